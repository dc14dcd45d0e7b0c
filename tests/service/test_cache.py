"""What is made once for many: by one, for all who waited, within a bound."""

import asyncio
import itertools

import pytest

from loopscope.service.cache import ResultCache


def run(coroutine):
    return asyncio.run(coroutine)


def test_those_who_waited_take_what_was_begun_after_they_asked():
    # The version changes at every look, as a live run's does.
    made, versions = [], itertools.count()

    async def all_at_once():
        cache = ResultCache(most=8, most_bytes=100)
        asked = [
            cache.get(("a",), lambda: str(next(versions)), lambda: made.append(1) or len(made), lambda _: 1)
            for _ in range(50)
        ]
        return await asyncio.gather(*asked)

    found = run(all_at_once())
    # One for whoever came first, one that was begun after all the others had asked.
    assert len(made) <= 2
    assert set(found) <= {1, 2}


def test_a_new_version_is_made_anew_and_an_old_one_is_not():
    async def one_after_the_other():
        cache, made = ResultCache(most=8, most_bytes=100), []
        return [
            await cache.get(("a",), lambda v=v: v, lambda: made.append(1) or len(made), lambda _: 1)
            for v in ("x", "x", "y", "y")
        ]

    assert run(one_after_the_other()) == [1, 1, 2, 2]


def test_the_least_recently_asked_go_by_number_and_by_size():
    async def many():
        cache = ResultCache(most=3, most_bytes=100)
        for name, size in (("a", 40), ("b", 40), ("a", 40), ("c", 40), ("d", 10)):
            await cache.get((name,), lambda: "v", lambda n=name: n, lambda _, s=size: s)
        return cache

    cache = run(many())
    assert list(cache._made) == [("a",), ("c",), ("d",)]
    assert cache.bytes == 90


def test_one_that_is_too_large_is_kept_alone():
    async def huge():
        cache = ResultCache(most=3, most_bytes=100)
        for name, size in (("a", 10), ("b", 1000)):
            await cache.get((name,), lambda: "v", lambda n=name: n, lambda _, s=size: s)
        return cache

    assert list(run(huge())._made) == [("b",)]


def test_a_failure_is_the_askers_own_and_nothing_is_kept():
    async def fails():
        cache = ResultCache(most=3, most_bytes=100)
        with pytest.raises(ValueError, match="no"):
            await cache.get(("a",), lambda: "v", lambda: (_ for _ in ()).throw(ValueError("no")), lambda _: 1)
        return await cache.get(("a",), lambda: "v", lambda: 7, lambda _: 1), len(cache._locks)

    assert run(fails()) == (7, 0)
