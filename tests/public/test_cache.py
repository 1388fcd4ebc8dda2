"""The cache: when it is used, damaged files, secrecy of names."""

import hashlib
import stat
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdsl.public import cache, features
from pdsl.public.cache import cache_folder, cached, without_cache
from pdsl.public.features import fit_features
from pdsl.settings import PublicSettings
from pdsl.utils.inputs import tensors_digest
from pdsl.utils.workers import Workers
from tests.helpers.refusals import refused
from tests.public.test_patches import images

SETTINGS = {"features": "patches", "patch": 3, "pool": 2, "filters": 6, "components": 5}


class Counting:
    """A computation that counts how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Tensor]:
        self.calls += 1
        return {"a": torch.arange(6.0), "b": torch.ones(2, 3, dtype=torch.int64)}


def test_the_same_key_is_computed_once(empty_cache: Path) -> None:
    compute = Counting()
    first, path = cached("kind", "key", compute)
    second, again = cached("kind", "key", compute)
    assert compute.calls == 1
    assert path == again and path.parent == empty_cache
    assert {name: t.tolist() for name, t in first.items()} == {name: t.tolist() for name, t in second.items()}
    assert second["b"].dtype == torch.int64


def test_another_key_or_kind_is_computed(empty_cache: Path) -> None:
    compute = Counting()
    for kind, key in (("kind", "key"), ("kind", "other"), ("other", "key")):
        cached(kind, key, compute)
    assert compute.calls == 3


def fits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Feature maps that were fitted and not found."""
    calls: list[object] = []
    honest = features._fit

    def counted(*of: object) -> object:
        calls.append(of)
        return honest(*of)  # type: ignore[arg-type]

    monkeypatch.setattr(features, "_fit", counted)
    return calls


def fit(public: Tensor, **changes: object) -> features.FeatureMap:
    with Workers(1) as workers:
        return fit_features(PublicSettings.model_validate({**SETTINGS, **changes}), public, workers)


def test_a_feature_map_is_found_for_the_same_public_set_and_settings(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, public = fits(monkeypatch), images(20)
    first, second = fit(public), fit(public.clone())
    assert len(calls) == 1
    assert first.digest == second.digest and first.path == second.path
    fit(public, start="labels")  # does not change the map
    assert len(calls) == 1


@pytest.mark.parametrize("changes", [{"filters": 8}, {"whitening": 0.4}, {"components": 4}, {"mirror": True}], ids=str)
def test_other_settings_are_fitted_anew(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    calls, public = fits(monkeypatch), images(20)
    first, second = fit(public), fit(public, **changes)
    assert len(calls) == 2
    assert first.digest != second.digest


def test_another_public_set_is_fitted_anew(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, public = fits(monkeypatch), images(20)
    other = public.clone()
    other[3, 0, 2, 2] += 1e-3
    assert fit(public).digest != fit(other).digest
    assert len(calls) == 2
    fit(public[:-1])
    assert len(calls) == 3


def test_features_of_other_records_are_not_mistaken(empty_cache: Path) -> None:
    made = fit(images(20))
    with Workers(1) as workers:
        for seed in (1, 2, 1):
            records = images(10, seed=seed)
            assert torch.equal(made.cached(records, workers, "cpu", ""), made(records, workers))


def test_features_of_the_same_training_set_are_kept_in_memory_between_runs(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of a sweep: the public and test sets are new tensors, and the training set is the same."""
    made, training = fit(images(20)), images(30, seed=1)
    asked: list[str] = []
    honest = features.cached

    def watched(kind: str, key: str, compute: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], Path]:
        asked.append(kind)
        return honest(kind, key, compute)

    monkeypatch.setattr(features, "cached", watched)
    with Workers(1) as workers:
        for run in range(2):
            asked.clear()
            for inputs in (images(5, seed=2), images(6, seed=3), training):
                made.cached(inputs, workers, "cpu", "")
            assert len(asked) == (3 if run == 0 else 2)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def alter_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"sha256", b"sha257", 1))


@pytest.mark.parametrize("damage", [truncate, empty, alter, alter_header])
def test_a_damaged_file_is_computed_again_with_one_warning(empty_cache: Path, damage: Callable[[Path], None]) -> None:
    compute = Counting()
    first, path = cached("kind", "key", compute)
    damage(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second, _ = cached("kind", "key", compute)
    assert [str(w.message) for w in caught] == [f"{path} is damaged; it is computed again"]
    assert compute.calls == 2
    assert all(torch.equal(first[name], second[name]) for name in first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached("kind", "key", compute)  # it is intact again
    assert compute.calls == 2


def test_names_are_keyed_with_a_secret_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = images(3)
    key = tensors_digest([records])
    names = []
    for folder in ("one", "two"):
        monkeypatch.setenv("PDSL_CACHE", str(tmp_path / folder))
        _, path = cached("features", key, Counting())
        names.append(path.name)
    assert names[0] != names[1]
    for text in (key, f"features {key}"):
        plain = hashlib.sha256(text.encode()).hexdigest()
        assert not any(plain[:8] in name or key[:8] in name for name in names)
    content = b"".join(file.read_bytes() for file in (tmp_path / "one").iterdir() if file.suffix == ".safetensors")
    assert key.encode() not in content


def test_files_can_be_read_by_their_owner_only_except_maps_that_runs_link_to(empty_cache: Path) -> None:
    cached("kind", "key", Counting())
    made = fit(images(20))
    with Workers(1) as workers:
        made.cached(images(5, seed=1), workers, "cpu", "")
    files = list(empty_cache.iterdir())
    assert {file.suffix for file in files} == {".safetensors", ".lock", ".key"}
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in files}
    public = {name for name in modes if name.startswith("weights-") and name.endswith(".safetensors")}
    assert len(public) == 1
    assert {mode for name, mode in modes.items() if name not in public} == {0o600}


def test_the_secret_is_created_once_and_repaired_if_cut_off(empty_cache: Path) -> None:
    cached("kind", "key", Counting())
    secret = (empty_cache / cache.KEY).read_bytes()
    assert len(secret) == 32
    cached("kind", "other", Counting())
    assert (empty_cache / cache.KEY).read_bytes() == secret
    (empty_cache / cache.KEY).write_bytes(secret[:5])
    cached("kind", "key", Counting())
    assert len((empty_cache / cache.KEY).read_bytes()) == 32


def test_the_folder_is_pdsl_cache_or_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSL_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.setenv("PDSL_CACHE", "~/there")
    assert cache_folder() == Path.home() / "there"
    monkeypatch.delenv("PDSL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "pdsl" / "public"


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("PDSL_CACHE", str(folder))
        with refused("cannot use the cache", str(folder), "PDSL_CACHE"):
            cached("kind", "key", Counting())


def test_an_error_of_the_computation_is_not_blamed_on_the_cache(empty_cache: Path) -> None:
    def fails() -> dict[str, Tensor]:
        raise FileNotFoundError(2, "No such file or directory", "weights.pt")

    with pytest.raises(FileNotFoundError):
        cached("kind", "key", fails)


def test_without_cache_everything_is_computed_and_nothing_is_kept(empty_cache: Path) -> None:
    compute = Counting()
    with without_cache():
        cached("kind", "key", compute)
        cached("kind", "key", compute)
    assert compute.calls == 2
    assert not empty_cache.exists()
    made = fit(images(20))
    records = images(5, seed=1)
    with Workers(1) as workers:
        wrong = torch.zeros(5, 5)
        features._recent.append((records, made.digest, wrong))
        with without_cache():
            assert torch.equal(made.cached(records, workers, "cpu", ""), made(records, workers))
