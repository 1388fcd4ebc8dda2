"""Keys, cards, plans and pins, and the refusal of invalid ones."""

import tomllib
from pathlib import Path

import pytest
import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdsl.peer.identity import VALIDITY, Identity, PeerInfo
from pdsl.peer.plan import Timeouts, TrainingPlan, compose
from pdsl.peer.trust_store import TrustStore
from pdsl.utils.errors import PdslError
from tests.helpers.organisations import make_organisations, make_plan, with_hash
from tests.helpers.refusals import refused

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_a_folder_is_private_to_its_owner(tmp_path: Path) -> None:
    made = Identity.create(tmp_path / "ada", "ada", "localhost:7443")
    assert (tmp_path / "ada").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "ada" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert Identity.load(tmp_path / "ada") == made
    assert "PRIVATE" not in repr(made)
    for file, mode in (("key.pem", 0o640), (".", 0o750)):
        path = tmp_path / "ada" / file
        before = path.stat().st_mode
        path.chmod(mode)
        with refused("open to other"):
            Identity.load(tmp_path / "ada")
        path.chmod(before)
    with refused("already has a key"):
        Identity.create(tmp_path / "ada", "ada", "localhost:7443")


def test_a_key_must_match_its_card(tmp_path: Path) -> None:
    a, b = make_organisations(tmp_path, 2)
    (b.folder / "key.pem").write_bytes(a.key)
    with refused("does not match"):
        Identity.load(b.folder)


def test_card_round_trip(tmp_path: Path) -> None:
    (a,) = make_organisations(tmp_path, 1)
    read = PeerInfo.parse(a.card.to_toml().encode(), "card")
    assert read == a.card and read.fingerprint == a.card.fingerprint


def test_a_certificate_that_could_sign_others_is_refused(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ada")])
    for ca, dns, reason in ((True, "ada", "sign other"), (False, "ben", "not for the name")):
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), 1, *VALIDITY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
        with refused(reason):
            PeerInfo.from_values({"name": "ada", "address": "h:1", "certificate": pem}, "card")


def test_plan_round_trip_and_a_changed_digit(tmp_path: Path) -> None:
    plan = make_plan(make_organisations(tmp_path))
    text = plan.to_toml()
    read = TrainingPlan.parse(text.encode(), "plan")
    assert read == plan and read.hash == plan.hash
    changed = text.replace("target_epsilon = 8.0", "target_epsilon = 9.0")
    assert changed != text
    with refused("hash does not match"):
        TrainingPlan.parse(changed.encode(), "plan")
    values = tomllib.loads(text)
    values["config"]["rounds"] = 4
    with refused("hash does not match"):
        TrainingPlan.parse(tomli_w.dumps(values).encode(), "plan")


def test_a_version_with_more_settings_reads_an_older_plan_with_the_same_hash(tmp_path: Path) -> None:
    plan = make_plan(make_organisations(tmp_path))
    values = tomllib.loads(plan.to_toml())
    del values["config"]["algorithm"]["gossip_steps"]  # as if this version had added it
    values["pdsl"] = "0.0.1"
    older = with_hash(values)
    read = TrainingPlan.parse(tomli_w.dumps(older).encode(), "mail")
    assert read.hash == older["hash"] and read.config == plan.config
    assert TrainingPlan.parse(read.to_toml().encode(), "copy") == read


def test_a_plan_of_a_later_version_is_refused_with_its_version(tmp_path: Path) -> None:
    values = tomllib.loads(make_plan(make_organisations(tmp_path)).to_toml())
    values["config"]["algorithm"]["later"] = 1
    values["pdsl"] = "99.0\x1b[2J"
    with refused("later", "made by pdsl 99.0?[2J"):
        TrainingPlan.parse(tomli_w.dumps(with_hash(values)).encode(), "mail")
    values["format"] = 99
    with refused("plan format 99", "same version"):
        TrainingPlan.parse(tomli_w.dumps(with_hash(values)).encode(), "mail")


@pytest.mark.parametrize(
    ("settings_", "reason"),
    [
        ({"model": {"name": "os:getcwd"}}, "os is not a package of models"),
        ({"model": {"name": "lenet"}}, "not built in"),
        ({"model": {"name": "clinic_models:net"}}, "do not name the same code"),
        ({"model": {"weights_path": "/etc/passwd"}}, "a path on one machine"),
        ({"model": {"name": "layers", "layers": [{"type": "Flatten"}]}}, "no parameters to train"),
        ({"public": {"features": "model"}}, "frozen first layers"),
        ({"public": {"features": "os.path:join"}}, "os is not a package of models"),
        ({"public": {"features": "patches", "filters": 100_000, "patch": 64}}, "are allowed"),
        ({"graph": {"kind": "file", "path": "/etc/passwd"}}, "needs no file"),
        ({"graph": {"kind": "base-k"}}, "changes from round to round"),
        ({"graph": {"agents": 5}}, "4 members"),
        ({"privacy": {"randomness": "seeded"}}, "randomness=system"),
        ({"privacy": {"mode": "none"}}, "mode=total"),
        ({"batch": {"sampler": "fixed"}}, "poisson"),
    ],
)
def test_settings_that_a_plan_refuses(tmp_path: Path, settings_: dict, reason: str) -> None:
    with refused(reason):
        make_plan(make_organisations(tmp_path), **settings_)


def test_duplicate_members_are_refused(tmp_path: Path) -> None:
    a, b, *_ = make_organisations(tmp_path)
    with refused("each card once"):
        make_plan([a, b, a])


@few
@given(st.data())
def test_fuzz_damaged_plans_and_cards_are_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    plan, text = _example(tmp_path_factory)
    content = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    for parse in (TrainingPlan.parse, PeerInfo.parse):
        try:
            read = parse(bytes(content), "mail")
        except PdslError as e:
            assert "\n" not in str(e)
        else:
            assert read == plan  # the change was in white space or a comment


@few
@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_fuzz_any_bytes_are_refused(content: bytes) -> None:
    for parse in (TrainingPlan.parse, PeerInfo.parse):
        with pytest.raises(PdslError):
            parse(content, "mail")


def test_deep_and_long_files_are_refused() -> None:
    for content in (b"a = " + b"[" * 100_000, b"a = " + b"9" * 100_000, b"#" * 2_000_000):
        with pytest.raises(PdslError):
            TrainingPlan.parse(content, "mail")


def test_two_pins_for_rotation_and_none_after_revocation(tmp_path: Path) -> None:
    (a,) = make_organisations(tmp_path, 1)
    pins = TrustStore(tmp_path / "pins")
    assert pins.certificates("ada") == []
    pins.add(a.card)
    pins.add(a.card)
    assert pins.certificates("ada") == [a.card.certificate]
    b = Identity.renew(a.folder)
    assert b.card.fingerprint != a.card.fingerprint and Identity.load(a.folder) == b
    pins.add(b.card)
    assert pins.certificates("ada") == [a.card.certificate, b.card.certificate]
    with refused("remove one first"):
        pins.add(Identity.renew(a.folder).card)
    with refused("0 pins"):
        pins.revoke("0" * 16)
    assert pins.revoke(a.card.fingerprint[:16]).name == "ada"
    assert pins.certificates("ada") == [b.card.certificate]
    pins.revoke(b.card.fingerprint)
    assert pins.certificates("ada") == []


_kept: list[tuple[TrainingPlan, str]] = []


def _example(factory: pytest.TempPathFactory) -> tuple[TrainingPlan, str]:
    if not _kept:
        plan = make_plan(make_organisations(factory.mktemp("fuzz")))
        _kept.append((plan, plan.to_toml()))
    return _kept[0]


@pytest.mark.parametrize(
    ("assignments", "robust"),
    [([], True), (["mixing.robust=false"], False), (["algorithm.name=def-kt"], False)],
)
def test_a_composed_plan_mixes_robustly_unless_its_settings_or_algorithm_say_otherwise(
    tmp_path: Path, assignments: list[str], robust: bool
) -> None:
    members = make_organisations(tmp_path, 3)
    task = make_plan(members).task
    plan = compose([m.card for m in members], None, ["model.name=softmax", *assignments], task, Timeouts())
    assert plan.config.mixing.robust is robust
    assert TrainingPlan.parse(plan.to_toml().encode(), "plan") == plan
