"""Keys of random draws."""

import hashlib

import torch

from prefed.core import Key


def test_a_stream_is_the_hash_of_seed_and_path():
    """The definition, written out: 63 bits of SHA-256 of the seed and the steps, separated by U+001F."""
    digest = hashlib.sha256(b"7\x1f'round'=3\x1f'client'='a'\x1f'batches'").digest()
    key = Key(7).at("round", 3).at("client", "a").at("batches")
    assert key.number() == int.from_bytes(digest[:8], "big") >> 1


def test_a_seeded_device_draws_what_the_stream_does():
    with torch.random.fork_rng(devices=[]):
        Key(7).at("dropout", 0).seed_device("cpu")
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=Key(7).at("dropout", 0).torch()))
