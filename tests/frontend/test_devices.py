"""Which devices the replicas get, by platform."""

from __future__ import annotations

import pytest

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError
from hex_llm.frontend import devices
from hex_llm.frontend.devices import variables_of


def of(num_replicas: int, size: int, **environ: str) -> list[dict[str, str]]:
    config = EngineConfig(data_parallel_size=num_replicas, tensor_parallel_size=size)
    return variables_of(config, environ)


def test_those_who_prefill_and_decode_apart_need_devices_for_both() -> None:
    config = EngineConfig(data_parallel_size=2, disagg_topo="1,2")
    with pytest.raises(ConfigError, match="6 devices are needed, 3 for each replica"):
        variables_of(config, {"JAX_PLATFORMS": "cpu"})


def test_hosts_divide_the_replicas() -> None:
    config = EngineConfig(data_parallel_size=4, num_hosts=2, coordinator_address="a:1", host_index=1)
    visible = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "3,5"}
    assert variables_of(config, visible) == [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "5"}]


def test_one_replica_takes_what_it_finds() -> None:
    assert of(1, 4, JAX_PLATFORMS="cuda") == [{}]


def test_gpus_are_divided_in_order() -> None:
    visible = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "3,5, 6,GPU-7"}
    assert of(2, 2, **visible) == [{"CUDA_VISIBLE_DEVICES": "3,5"}, {"CUDA_VISIBLE_DEVICES": "6,GPU-7"}]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in of(3, 1, **visible)] == ["3", "5", "6"]
    with pytest.raises(ConfigError, match=r"=3: 6 devices are needed, 2 for each .* 4 gpu device\(s\)"):
        of(3, 2, **visible)


def test_gpus_are_counted_where_nobody_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "glob", lambda pattern: ["0", "1"] if "nvidia" in pattern else [])
    assert of(2, 1, JAX_PLATFORMS="cuda") == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]


def test_chips_of_a_tpu_are_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "glob", lambda pattern: list("01234567") if "accel" in pattern else [])
    assert of(2, 4) == [
        {
            "TPU_VISIBLE_CHIPS": chips,
            "TPU_PROCESS_BOUNDS": "1,1,1",
            "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        }
        for chips in ("0,1,2,3", "4,5,6,7")
    ]
    with pytest.raises(ConfigError, match="1, 2, 4 or 8 chips of a TPU, not 3"):
        of(2, 3)


def test_virtual_devices_are_made_for_each() -> None:
    flags = "--a --xla_force_host_platform_device_count=4 --b"
    assert (
        of(2, 2, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
        == [{"XLA_FLAGS": "--a --xla_force_host_platform_device_count=2 --b"}] * 2
    )
    with pytest.raises(ConfigError, match=r"are 1 cpu device\(s\); .*XLA_FLAGS=\S+count=4$"):
        of(2, 2, JAX_PLATFORMS="cpu")
