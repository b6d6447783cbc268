"""Hugging Face models: saved to a mount, loaded from another, and the same model through `lake://`."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest

from lakefs.plugins.fsspec.connections import disconnect
from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.mount.mounts import BUCKET, lake
from tests.plugins.fsspec.test_libraries import run

pytestmark = [pytest.mark.plugins, pytest.mark.fuse, pytest.mark.slow]

PROGRAM: Final = """
    import os, pathlib, time, fsspec, safetensors, safetensors.torch, torch, transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    here, there, bucket = {here!r}, {there!r}, {bucket!r}
    words = {{word: number for number, word in enumerate(["[UNK]", "the", "lake", "keeps", "models"])}}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=100
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    lake = fsspec.filesystem("lake")

    def save(folder):
        model.save_pretrained(folder, max_shard_size="200KB")
        tokenizer.save_pretrained(folder)

    def contents(folder):
        return {{path.name: path.read_bytes() for path in pathlib.Path(folder).glob("*")}}

    def catch_up(folder, like):
        end = time.monotonic() + 60
        while contents(folder) != contents(like):
            assert time.monotonic() < end, f"{{folder}} has not what {{like}} has"
            time.sleep(0.01)

    def is_same(folder):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        ids = transformers.AutoTokenizer.from_pretrained(folder)("the lake keeps models", return_tensors="pt").input_ids
        expected = model.state_dict()
        found = loaded.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        with torch.no_grad():
            return torch.equal(loaded(ids).logits, model(ids).logits)

    save(f"{{here}}/saved")
    print(len([name for name in os.listdir(f"{{here}}/saved") if name.endswith(".safetensors")]) > 1)
    catch_up(f"{{there}}/saved", f"{{here}}/saved")
    print(is_same(f"{{here}}/saved"), is_same(f"{{there}}/saved"))

    save("local")
    lake.put("local", f"{{bucket}}/put", recursive=True)
    catch_up(f"{{there}}/put", "local")
    print(is_same(f"{{there}}/put"))

    lake.get(f"{{bucket}}/saved", "fetched", recursive=True)
    print(is_same("fetched"))

    tensors = {{}}
    for name in lake.glob(f"{{bucket}}/saved/*.safetensors"):
        tensors |= safetensors.torch.load(lake.cat_file(name))
    print(all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items() if name in tensors))

    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    save(f"{{here}}/saved")
    catch_up(f"{{there}}/saved", f"{{here}}/saved")
    print(is_same(f"{{there}}/saved"))
"""


def test_a_model_is_the_same_from_each_mount_and_through_the_url(tmp_path: Path) -> None:
    with TemporaryDirectory(prefix="lake-") as folder, lake(Path(folder), mounts=2) as mounts:
        here, there = map(str, mounts.folders)
        fs = LakeFileSystem(server=mounts.served.server)
        program = PROGRAM.format(here=here, there=there, bucket=BUCKET)
        assert run(fs, program, tmp_path) == "True\nTrue True\nTrue\nTrue\nTrue\nTrue\n"
        LakeFileSystem.clear_instance_cache()
        disconnect()
