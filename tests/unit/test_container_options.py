"""What a container on the chips is given, with and without the ascend runtime."""

from __future__ import annotations

from pathlib import Path

from pipeline.ascend.container import DRIVER_MOUNTS, SHM_SIZE, container_options, visible_chips


def test_the_ascend_runtime_is_told_the_chips_and_nothing_else():
    options = container_options([2, 3], runtimes=["runc", "ascend"])
    assert (options.runtime, options.env) == ("ascend", {"ASCEND_VISIBLE_DEVICES": "2,3"})
    assert (options.devices, options.mounts, options.shm_size) == ((), (), SHM_SIZE)


def test_without_it_devices_and_driver_are_mapped_one_by_one():
    options = container_options([2], runtimes=["runc"])
    assert options.runtime is None
    assert options.devices == ("/dev/davinci2", "/dev/davinci_manager", "/dev/hisi_hdc", "/dev/devmm_svm")
    assert options.mounts == DRIVER_MOUNTS


def test_host_ids_are_never_given_to_the_server():
    for runtimes in (["ascend"], []):
        assert "ASCEND_RT_VISIBLE_DEVICES" not in container_options([2, 3], runtimes=runtimes).env


def test_chips_are_the_numbered_nodes_in_order_of_number(tmp_path: Path):
    for name in ("davinci10", "davinci2", "davinci_manager", "davinci", "davinci1x", "hisi_hdc", "davinci٣"):
        (tmp_path / name).touch()
    assert visible_chips(tmp_path) == (2, 10)
    assert visible_chips(tmp_path / "none") == ()
