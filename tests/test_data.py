"""
The data: what is read is what was there, split by file, and a batch is a function of (seed, step) alone.
"""
import functools
import hashlib
import http.server
import threading
from pathlib import Path

import numpy as np
import pytest
import tiktoken

import data


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def folder(sizes):
    """A folder of text files of the given sizes, each filled with a byte of its own."""
    Path("texts/inner").mkdir(parents=True)
    for i, size in enumerate(sizes):
        Path("texts/inner" if i % 2 else "texts", f"{i}.txt").write_bytes(bytes([i]) * size)
    return "texts"


# ----------------------------------------------------------------------------------------------------- text
def test_text_is_split_by_file_and_nothing_is_lost():
    sizes = [50 + 10 * i for i in range(30)]
    train, val, info = data.dataset(folder(sizes))
    found = {}
    for name, (tokens,) in (("train", train), ("val", val)):
        documents = np.split(tokens, np.flatnonzero(tokens == 256))[1:]     # each after an end-of-text
        for document in documents:
            byte = document[1]
            assert (document[1:] == byte).all() and byte not in found
            found[byte] = (name, len(document) - 1)
    assert {i: size for i, (_, size) in found.items()} == dict(enumerate(sizes))
    held_out = sum(size for name, size in found.values() if name == "val")
    assert 0.05 * sum(sizes) < held_out <= 0.1 * sum(sizes)
    assert info["files"] == 30 and info["bytes"] == sum(sizes)


def test_one_file_keeps_its_last_tenth_for_validation():
    Path("one.txt").write_bytes(bytes(range(200)) * 5)
    (train,), (val,), _ = data.dataset("one.txt")
    assert len(train) == 900 and np.array_equal(np.concatenate((train, val))[1:], np.tile(np.arange(200), 5))


def test_the_fingerprint_changes_with_the_content_only():
    name = folder([100, 200])
    first, again = data.dataset(name)[2], data.dataset(name)[2]
    Path(name, "0.txt").write_bytes(b"x" * 100)
    assert first == again and data.dataset(name)[2]["sha256"] != first["sha256"]


def test_tokens_are_mapped_not_read():
    assert isinstance(data.dataset(folder([100]))[0][0], np.memmap)


def test_the_standard_library_has_no_site_packages():
    root, files = data.text_files("python")
    assert len(files) > 100 and all(f.suffix == ".py" for f in files)
    assert not any("site-packages" in f.relative_to(root).parts for f in files)


@pytest.mark.parametrize("name, what", [("nowhere", "no such"), ("empty.txt", "empty"), ("none", "empty")])
def test_text_that_is_not_there(name, what):
    Path("empty.txt").touch()
    Path("none").mkdir()
    with pytest.raises(ValueError, match=what):
        data.dataset(name)


# ----------------------------------------------------------------------------------------------- tokenizers
@pytest.fixture
def bytewise_gpt2(monkeypatch):
    """GPT-2's encoding without its merges, in place of the vocabulary that needs a network."""
    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding("gpt2", pat_str=r"[\s\S]", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 50256})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)


def test_special_tokens_in_a_text_are_text(bytewise_gpt2):
    Path("a.txt").write_text("<|endoftext|>é")
    (train,), (val,), _ = data.dataset("a.txt", "gpt2")
    assert list(np.concatenate((train, val))) == [50256, *"<|endoftext|>é".encode()]


def test_gpt2_decodes_what_it_encodes(bytewise_gpt2):
    encode, decode = data.tokenizer("gpt2")
    assert decode(encode("naïve".encode())) == "naïve"


def test_text_that_is_not_utf8_is_bytes_and_for_gpt2_a_sentence(bytewise_gpt2):
    Path("a.bytes").write_bytes(b"\xff\xfe" * 20)
    assert data.dataset("a.bytes", "bytes")[0][0][1] == 0xFF
    with pytest.raises(ValueError, match="UTF-8"):
        data.dataset("a.bytes", "gpt2")
    assert [path.name.split("-")[:2] for path in Path("data").iterdir()] == [["a.bytes", "bytes"]]


def test_no_network_says_what_to_put_where(monkeypatch):
    def no_network(name):
        raise OSError("no route")
    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    Path("a.txt").write_text("text")
    with pytest.raises(ValueError, match="vocab.bpe.*TIKTOKEN_CACHE_DIR"):
        data.dataset("a.txt", "gpt2")


def test_bytes_decode_drops_the_end_of_text():
    encode, decode = data.tokenizer("bytes")
    assert decode([256, *encode("é!".encode())]) == "é!"


# --------------------------------------------------------------------------------------------------- shards
def write_shard(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    Path(path).write_bytes(header.tobytes() + np.asarray(ids, dtype="<u2").tobytes())


def test_shards_with_and_without_a_header():
    ids = np.random.default_rng(0).integers(50257, size=1000)
    write_shard("x_train_1.bin", ids)
    write_shard("x_train_2.bin", ids[:500])
    write_shard("x_val_1.bin", ids[500:])
    ids.astype("<u2").tofile("train.bin")
    ids[:10].astype("<u2").tofile("val.bin")
    train, val, info = data.dataset("x_train_*.bin")
    assert [list(a) for a in train] == [list(ids), list(ids[:500])] and list(val[0]) == list(ids[500:])
    assert info["tokenizer"] == "gpt2" and info["files"] == 3
    train, val, _ = data.dataset("train.bin")
    assert list(train[0]) == list(ids) and list(val[0]) == list(ids[:10])


BROKEN = {
    "version": lambda: write_shard("a.bin", [1, 2, 3], version=2),
    "count": lambda: write_shard("a.bin", [1, 2, 3], count=4),
    "truncated": lambda: Path("a.bin").write_bytes(np.array([20240520, 1], dtype="<i4").tobytes()),
    "the id": lambda: write_shard("a.bin", [1, 50257]),
    # A header with another magic is no header, and its own words are no ids: junk cannot pass for tokens.
    "magic": lambda: write_shard("a.bin", [1, 2], magic=20240801),
    "odd": lambda: Path("a.bin").write_bytes(b"abc"),
    "empty": lambda: Path("a.bin").touch(),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_shards_are_refused(fault):
    BROKEN[fault]()
    with pytest.raises(ValueError, match="a.bin.*(version, count|the id|bytes)"):
        data.shard("a.bin", 50257)


def test_a_headered_shard_is_never_read_as_a_raw_one():
    assert 20240520 & 0xFFFF >= 50257                       # the magic's first half is no GPT-2 id


@pytest.mark.parametrize("name", ("x_*.bin", "x_train_*.bin", "x.bin", "fineweb:0", "fineweb:many"))
def test_shards_that_are_not_there(name):
    write_shard("x_train_1.bin", [1, 2])
    write_shard("x.bin", [1, 2])
    with pytest.raises(ValueError, match="shards"):
        data.dataset(name)


# ------------------------------------------------------------------------------------------------- download
@pytest.fixture
def server(tmp_path, monkeypatch):
    """FineWeb's shards from a server of our own: the first training shard is whole, the second is not."""
    remote = tmp_path / "remote"
    remote.mkdir()
    write_shard(remote / "fineweb_val_000000.bin", range(100))
    write_shard(remote / "fineweb_train_000001.bin", range(1000))
    write_shard(remote / "fineweb_train_000002.bin", range(1000), count=2000)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)
    asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=remote)) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        monkeypatch.setattr(data, "FINEWEB", f"http://127.0.0.1:{s.server_port}/")
        yield asked
        s.shutdown()


def test_fineweb_is_fetched_once_and_whole(server):
    train, val, info = data.dataset("fineweb:1")
    assert list(train[0]) == list(range(1000)) and len(val[0]) == 100 and info["tokenizer"] == "gpt2"
    asked = len(server)
    data.dataset("fineweb:1")
    assert len(server) == asked == 2


@pytest.mark.parametrize("why", ("version, count", "404"))
def test_a_shard_that_is_not_whole_is_not_kept(server, why):
    if why == "404":
        Path("remote/fineweb_train_000002.bin").unlink()
    with pytest.raises(ValueError, match=f"did not arrive whole .*{why}"):
        data.dataset("fineweb:2")
    kept = sorted(path.name for path in Path("data/fineweb10B").iterdir())
    assert kept == ["fineweb_train_000001.bin", "fineweb_val_000000.bin"]


# -------------------------------------------------------------------------------------------------- batches
def test_a_batch_is_a_function_of_seed_and_step():
    tokens = [np.arange(1000, dtype=np.uint16)]
    batches = {(seed, step): data.batch(tokens, 8, 4, seed, step) for seed in (0, 1) for step in (0, 1, 2)}
    for (seed, step), rows in batches.items():
        assert rows.shape == (4, 9) and rows.equal(data.batch(tokens, 8, 4, seed, step))
        assert (rows.diff() == 1).all()
    assert len({hashlib.sha256(rows.numpy()).digest() for rows in batches.values()}) == 6


def test_every_window_is_drawn_equally_often_and_none_crosses_a_shard():
    L, lengths = 3, (10, 3, 4, 40)                          # windows start at 7 + 0 + 1 + 37 places
    starts = np.cumsum((0,) + lengths)
    tokens = [np.arange(a, b, dtype=np.uint16) for a, b in zip(starts, starts[1:])]
    rows = data.batch(tokens, L, 45_000, 0, 0)
    allowed = {a + i for a, n in zip(starts, lengths) for i in range(n - L)}
    drawn, count = np.unique(rows[:, 0], return_counts=True)
    assert (rows.diff() == 1).all() and set(drawn) == allowed and len(allowed) == 45
    assert abs(count - 1000).max() < 5 * 1000 ** 0.5        # five standard deviations


def test_validation_windows_are_fixed_and_spread():
    tokens = [np.arange(a, b, dtype=np.uint16) for a, b in ((0, 100), (0, 5), (1000, 1200))]
    rows = data.windows(tokens, 8, 40)
    assert rows.shape == (40, 9) and (rows.diff() == 1).all() and rows.equal(data.windows(tokens, 8, 40))
    assert rows[::2, 0].max() > 80 and rows[1::2, 0].min() >= 1000 and rows[1::2, 0].max() > 1170
    assert len(rows[:, 0].unique()) == 40
