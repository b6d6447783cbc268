"""Checks of a bucket that somebody else's program has mounted: parts of objects, `tar` and `git clone`."""

from __future__ import annotations

from typing import Final

TREE: Final = """
trap 'fusermount3 -u -z mounted' EXIT
mountpoint -q mounted
mkdir -p tree/sub/deep
head -c 24000000 /dev/urandom > tree/big
for number in 1 2 3 4 5 6; do echo $number > tree/sub/deep/$number; done
: > tree/empty
"""

PARTS: Final = f"""
{TREE}
aws s3 cp --quiet tree/big s3://BUCKET/put/by/another
dd if=mounted/put/by/another bs=1 skip=4194300 count=11 status=none | cmp - <(tail -c +4194301 tree/big | head -c 11)
cmp mounted/put/by/another tree/big
"""

TAR: Final = f"""
{TREE}
tar -C tree -cf mounted/tree.tar .
mkdir mounted/extracted
tar --no-same-owner -C mounted/extracted -xf mounted/tree.tar
diff -r tree mounted/extracted
touch -d 2001-02-03T04:05:06Z mounted/extracted/empty
test "$(stat -c %Y mounted/extracted/empty)" = 981173106
mv mounted/extracted/big mounted/extracted/moved
cmp tree/big mounted/extracted/moved
rm -r mounted/extracted/sub
test "$(ls mounted/extracted)" = "$(printf 'empty\\nmoved')"
"""

GIT: Final = f"""
{TREE}
export GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@example.org GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@example.org
git init -q tree
git -C tree add .
git -C tree commit -qm one
git clone -q --no-hardlinks tree mounted/clone
git -C mounted/clone fsck --strict
test -z "$(git -C mounted/clone status --porcelain)"
git clone -q mounted/clone back
diff -r --exclude=.git tree back
"""
