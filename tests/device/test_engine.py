"""Memory and graphs of the engine over hand-overs: nothing stays or is made again without need."""

from __future__ import annotations

from tests.simulated_device.client import Devices

BODIES = "tests.device.engine_here"


def test_moments_are_there_before_the_first_cache(device: Devices) -> None:
    (found,) = device.run(f"{BODIES}:moments")
    # Main weights, gradients and two moments, of 4 bytes each.
    assert found["attached"] >= 16 * found["parameters"]
    assert found["first step"] < 4 * found["parameters"]
    assert found["moments in a checkpoint before it"] == found["steps before it"] == 0
    assert found["steps"] == 1


def test_what_is_offloaded_leaves_the_device(device: Devices) -> None:
    (found,) = device.run(f"{BODIES}:offloaded")
    stays = found["nothing"]
    for form in ("everything", "in parts"):
        leaves = found[form]
        assert stays["attached"] >= stays["ledger"] == leaves["ledger"] > 0
        assert leaves["attached"] < 0.01 * leaves["ledger"]
        assert leaves["updated"] - leaves["attached"] < 0.01 * leaves["ledger"]
        assert leaves["waits"] == stays["waits"], "a copy waits for the device"
        assert leaves["copies"] > 0 and not leaves["staged"]
        kept = leaves["ledger"] - leaves["grads"]
        assert kept <= leaves["pinned"] < 1.02 * kept and leaves["pinned after it"] == 0
    assert found["everything"]["needed"] >= stays["ledger"]
    assert found["in parts"]["needed"] < 0.6 * stays["ledger"]
    assert found["same"] == [True, True]


def test_sleep_gives_back_cache_and_own_weights(device: Devices) -> None:
    (found,) = device.run(f"{BODIES}:memory")
    assert found["cache 1"] == found["cache 2"] > 0
    assert found["samples"][0] == found["samples"][1]
    for version in (1, 2):
        assert found[f"weights {version}"] >= found["own"] > 0
        # At once, since the cache has a pool of its own; the weights' memory is still reserved.
        assert found[f"given back {version}"] == 0
    # What stays are graphs and what they compute.
    assert found["left 2"] < found["own"]


def test_the_cache_keeps_its_size_if_it_could_grow_by_little(device: Devices) -> None:
    assert device.run(f"{BODIES}:sizes") == [[12, 12, 7]]


def test_graphs_are_kept_while_what_they_read_stays(device: Devices) -> None:
    (found,) = device.run(f"{BODIES}:graphs")
    first = found["first"]["captures"]
    assert first > 0
    for name, row in found.items():
        assert row["right"], (name, row)
        assert row["replays"] > 0, (name, row)
        assert row["captures"] == (first if row["moved"] else 0), (name, row)
    assert not found["new weights"]["moved"]
    assert found["other cache"]["moved"]
    assert found["other weight"]["moved"]


def test_experts_are_not_copied_and_graphs_stay_over_versions(device: Devices) -> None:
    (found,) = device.run(f"{BODIES}:graphs_of_copies")
    for name, rows in found.items():
        assert rows[0]["captures"] > 0, name
        assert [row["captures"] for row in rows[1:]] == [0, 0], (name, rows)
        assert all(row["right"] and not row["copied"] for row in rows), (name, rows)
        assert rows[0]["samples"] != rows[1]["samples"], name


def test_a_step_is_launched_before_the_one_before_it_is_read(device: Devices) -> None:
    (found,) = device.run(f"{BODIES}:overlap")
    for name, case in found.items():
        assert case["same"], (name, case)
        # The host waits while the next step runs, unless that one starts rows.
        assert case["ahead"].keys() == {0, 1} and case["ahead"][1] > 9, (name, case)
        assert (case["samples"] < case["of"]) == (name == "cancelled"), (name, case)
    assert min(found["small cache"]["preemptions"]) > 0
    assert found["lengths"]["ahead"][1] > 2 * found["lengths"]["ahead"][0]
