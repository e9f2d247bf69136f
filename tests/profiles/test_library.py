"""The library: every file obeys the schema, and says where its figures come from."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from profiles.device_profile import DeviceKind, DeviceProfile, Origin
from profiles.library import (
    availability_names,
    load_availability,
    load_network,
    load_profile,
    profile_names,
)
from profiles.performance import Layout
from profiles.thermal import ThermalState

LIBRARY = files("profiles") / "library"
PROFILES = {name: load_profile(name) for name in profile_names()}
NETWORKS = sorted(entry.name.removesuffix(".toml") for entry in (LIBRARY / "networks").iterdir())
FOLDERS = {
    "devices": profile_names(),
    "networks": NETWORKS,
    "availability": availability_names(),
}


def text(folder: str, name: str) -> str:
    return (LIBRARY / folder / f"{name}.toml").read_text(encoding="utf-8")


def assumed(profile: DeviceProfile, what: str) -> list[str]:
    return [line for line in profile.provenance.assumed if line.startswith(f"{what}: ")]


every_profile = pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)


# --- device profiles ---


@pytest.mark.parametrize(("folder", "names"), FOLDERS.items(), ids=FOLDERS)
def test_a_file_has_the_name_of_what_is_in_it(folder: str, names: list[str]) -> None:
    assert names == sorted(names)
    for name in names:
        assert tomllib.loads(text(folder, name))["name"] == name


@every_profile
def test_every_figure_has_a_source(profile: DeviceProfile) -> None:
    assert profile.provenance.origin is Origin.PUBLISHED
    assert profile.provenance.licence
    for entry in profile.compute.values():
        assert entry.source
    for table in (profile.sustained, profile.power, profile.embodied):
        assert table is None or table.source
    assert not profile.memory.installed_bytes or profile.memory.source


@every_profile
def test_what_is_unknown_says_so(profile: DeviceProfile) -> None:
    assert len(assumed(profile, "memory")) == 1
    assert len(assumed(profile, "sustained")) == 1
    if profile.power is None or profile.power.idle_w is None:
        assert len(assumed(profile, "power")) == 1
    if profile.embodied is None:
        assert assumed(profile, "embodied") == ["embodied: unknown, left out"]
    missing = [dtype for dtype in ("fp32", "bf16", "fp16") if dtype not in profile.compute]
    said = assumed(profile, "dtypes")
    assert bool(missing) == bool(said)
    assert all(dtype in said[0] for dtype in missing)


@every_profile
def test_a_dtype_that_was_not_measured_runs_as_the_profile_says(profile: DeviceProfile) -> None:
    for said in assumed(profile, "dtypes"):
        taken = said.rsplit(" ", 1)[1]
        for dtype in {"fp32", "bf16", "fp16"} - set(profile.compute):
            model = profile.compute_model().model(dtype, dtype, Layout.NN)
            assert model.flops_per_s == pytest.approx(profile.compute[taken].flops_per_s)


@every_profile
def test_no_device_offers_more_than_it_has(profile: DeviceProfile) -> None:
    if profile.memory.installed_bytes:
        assert profile.memory.bytes <= 0.8 * profile.memory.installed_bytes
    elif profile.kind is not DeviceKind.CLOUD_GPU:
        assert 1e9 <= profile.memory.bytes <= 3e9


@every_profile
def test_phones_settle_at_half_of_their_speed(profile: DeviceProfile) -> None:
    if profile.kind is not DeviceKind.PHONE:
        assert profile.sustained is None
        return
    assert profile.sustained is not None
    model = profile.sustained.thermal
    assert model is not None
    assert model.sustained_speed == pytest.approx(0.5)
    # The one published phone with two points: 0.81 after 2 minutes, 0.49 after 10.
    state = ThermalState(model, model.ambient)
    speeds = {}
    while state.at_s < 600:
        state.busy(state.at_s, 1.0)
        speeds[round(state.at_s)] = model.speed(state.temperature)
    assert speeds[120] == pytest.approx(0.81, abs=0.03)
    assert speeds[max(speeds)] == pytest.approx(0.49, abs=0.02)


# --- embodied carbon, which keeps its licence ---


def test_embodied_carbon_is_merged() -> None:
    found = PROFILES["iphone-11"].embodied
    assert found is not None
    assert (found.gco2e, found.lifetime_years) == (60_800, 3)
    assert "Boavizta" in found.source


def test_what_a_file_says_of_embodied_carbon_stays() -> None:
    found = PROFILES["a100-pcie-40gb"].embodied
    assert found is not None
    assert found.gco2e == 181_000


def test_the_figures_of_boavizta_are_in_one_file_with_its_notice() -> None:
    notice = text("embodied", "boavizta")
    for words in ("ODbL", "DbCL", "Boavizta", "https://opendatacommons.org/licenses/odbl/1-0/"):
        assert words in notice
    for name in tomllib.loads(notice)["embodied"]:
        assert "embodied" not in tomllib.loads(text("devices", name))
    for name in profile_names():
        assert "environmental-footprint-data" not in text("devices", name)


def test_a_file_of_the_user_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "iphone-11.toml"
    path.write_text(text("devices", "iphone-11"), encoding="utf-8")
    found = load_profile(str(path))
    assert found.name == "iphone-11"
    assert found.embodied is None


# --- availabilities ---


@pytest.mark.parametrize("name", availability_names())
def test_availabilities_say_what_was_chosen(name: str) -> None:
    found = load_availability(name)
    assert found.source
    assert found.availability.always == (name == "always")
    assert found.availability.always or found.assumed


# --- names and files ---


def test_an_unknown_profile() -> None:
    with pytest.raises(ValueError, match="no profile 'iphone-13'") as caught:
        load_profile("iphone-13")
    said = str(caught.value)
    assert "iphone-13-pro" in said
    assert "cleave profile list" in said
    assert "\n" not in said


def test_unknown_networks_and_availabilities() -> None:
    with pytest.raises(ValueError, match=r"no network 'hom' .*\(similar: home.*use one of 4g, "):
        load_network("hom")
    with pytest.raises(ValueError, match=r"no availability 'volunteers' .*\(similar: volunteer\)"):
        load_availability("volunteers")


def test_files_of_the_user(tmp_path: Path) -> None:
    network, availability = tmp_path / "network.toml", tmp_path / "availability.toml"
    network.write_text(text("networks", "5g"), encoding="utf-8")
    availability.write_text(text("availability", "office"), encoding="utf-8")
    assert load_network(str(network)) == load_network("5g")
    assert load_availability(str(availability)) == load_availability("office")
    network.write_text(text("networks", "5g").replace("uplink_bytes", "uplink_bits"))
    with pytest.raises(ValueError, match=r"link of network .*network\.toml .*'uplink_bits_per_s'"):
        load_network(str(network))


@pytest.mark.parametrize("load", [load_profile, load_network, load_availability])
def test_missing_files(load: object) -> None:
    assert callable(load)
    with pytest.raises(ValueError, match=r"nowhere\.toml cannot be read: No such file"):
        load("nowhere.toml")
