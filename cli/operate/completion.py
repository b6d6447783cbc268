"""`lake completion`: prints the shell script that completes commands, options, and names in the lake."""

from __future__ import annotations

from importlib import import_module

import click

from cli.terminal.output import write_line


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for a shell: of commands, options, buckets, keys and spaces.

    Names come from the engine that the command would ask; if it does not answer at once, there are none.

    \b
    bash: lake completion bash > ~/.local/share/bash-completion/completions/lake
    zsh:  lake completion zsh > "${fpath[1]}/_lake"
    fish: lake completion fish > ~/.config/fish/completions/lake.fish
    """
    from click.shell_completion import get_completion_class

    import_module("cli.terminal.completing")
    completer = get_completion_class(shell)
    assert completer is not None
    write_line(completer(context.find_root().command, {}, "lake", "_LAKE_COMPLETE").source())
