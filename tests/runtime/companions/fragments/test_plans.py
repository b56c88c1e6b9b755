"""Plans of fragments: the best clusters, orders and cuts, within the memory of each machine."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mlx_runtime.companions.fragments import planfile, planning
from mlx_runtime.companions.fragments.costs import Block, Machine, Plan, stages_of
from mlx_runtime.companions.fragments.planning import plan
from mlx_runtime.errors import ConfigError

pytestmark = pytest.mark.pure


def case(seed: int, machines: int, blocks: int, memory: float) -> tuple[list[Block], list[Machine]]:
    """Return random blocks, and machines with `memory` times the memory of all blocks."""
    draw = random.Random(seed)
    made = []
    for index in range(blocks):
        weights = draw.randint(1, 100)
        sends, returns = draw.randint(1, 50), draw.randint(0, 50)
        kept, seconds = draw.randint(0, 200), draw.uniform(0.1, 2)
        sizes = (weights, weights, weights, 2 * weights, kept, sends, returns)
        made.append(Block(f"layers.{index}", *sizes, seconds, crossing=2 * sends))
    each = memory * sum(block.memory for block in made) / machines
    return made, [
        Machine(f"node_{index}", each * draw.uniform(0.3, 1.7), draw.choice([5, 20, 100]), draw.choice([0.5, 1, 4]))
        for index in range(machines)
    ]


def partitions(items: Sequence[Machine]) -> Iterator[list[list[Machine]]]:
    """Yield all ways to divide machines into clusters."""
    if not items:
        yield []
        return
    first, *others = items
    for found in partitions(others):
        yield [[first], *found]
        for index, part in enumerate(found):
            yield [*found[:index], [first, *part], *found[index + 1 :]]


def brute_force(
    blocks: list[Block], machines: list[Machine], microbatches: int, *, all_nodes: bool
) -> dict[int, float]:
    """Return the shortest step for each number of clusters, by trying all clusters, orders and cuts."""

    def step(cluster: Sequence[Machine]) -> float:
        found = [float("inf")]
        for count in [len(cluster)] if all_nodes else range(1, len(cluster) + 1):
            for order in itertools.permutations(cluster, count):
                for cuts in itertools.combinations(range(1, len(blocks)), count - 1):
                    stages = stages_of(blocks, order, [0, *cuts])
                    if all(stage.memory <= stage.machine.memory for stage in stages):
                        slowest = max(stage.compute_s + stage.transfer_s for stage in stages)
                        rounds = {1: 0, 2: 1, 3: 2, 4: 2}[count]  # as many machines as have the outputs send them
                        outputs = rounds * blocks[-1].sends / min(machine.bandwidth for machine in order)
                        found.append(slowest * (microbatches + count - 1) / microbatches + outputs)
        return min(found)

    steps: dict[frozenset[str], float] = {}
    best: dict[int, float] = {}
    for clusters in partitions(machines):
        for cluster in clusters:
            names = frozenset(machine.name for machine in cluster)
            if names not in steps:
                steps[names] = step(cluster)
        slowest = max(steps[frozenset(machine.name for machine in cluster)] for cluster in clusters)
        best[len(clusters)] = min(slowest, best.get(len(clusters), float("inf")))
    return best


def slowest(found: Plan) -> float:
    return max(map(found.step_s, range(len(found.clusters))))


def check(found: Plan) -> None:
    """Check that each cluster holds all blocks once, in order, and that all stages fit."""
    for stages in found.clusters:
        assert [index for stage in stages for index in range(stage.first, stage.last + 1)] == [
            *range(len(found.blocks))
        ]
        assert all(stage.memory <= stage.machine.memory for stage in stages)
    names = [stage.machine.name for stages in found.clusters for stage in stages]
    assert len({*names, *(machine.name for machine in found.idle)}) == len(names) + len(found.idle)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("all_nodes", [False, True])
def test_no_other_plan_of_few_machines_is_faster(seed: int, all_nodes: bool) -> None:
    blocks, machines = case(seed, machines=2 + seed % 3, blocks=3 + seed % 4, memory=1.3 + seed % 4)
    best = brute_force(blocks, machines, 1 + seed % 4, all_nodes=all_nodes)
    for clusters, expected in best.items():
        if expected == float("inf"):
            with pytest.raises(ConfigError, match="does not fit|too many"):
                plan(blocks, machines, microbatches=1 + seed % 4, clusters=clusters, all_nodes=all_nodes)
        else:
            found = plan(blocks, machines, microbatches=1 + seed % 4, clusters=clusters, all_nodes=all_nodes)
            check(found)
            assert slowest(found) == pytest.approx(expected)
            assert not (all_nodes and found.idle)


def test_the_number_of_clusters_with_the_most_batches_per_second_is_chosen() -> None:
    blocks, machines = case(3, machines=5, blocks=12, memory=4)
    found = plan(blocks, machines, average_every=100)
    others = [plan(blocks, machines, clusters=count, average_every=100) for count in (1, 2)]
    assert found.batches_per_s == max(item.batches_per_s for item in (found, *others))
    assert len({round(item.batches_per_s, 9) for item in others}) == 2


def test_rank_0_has_memory_for_checkpoints() -> None:
    """It is on the first machine that is used, which another one therefore follows here."""
    blocks = [Block(f"layers.{index}", 1, weights=10, states=20, seconds=1) for index in range(4)]
    machines = [Machine("small", 65), Machine("large", 185), Machine("third", 65)]
    found = plan(blocks, machines, clusters=1, collects=True)
    assert {stage.machine.name: stage.memory for stage in found.clusters[0]} == {"large": 180.0, "third": 60.0}
    assert [item.name for item in found.idle] == ["small"]
    assert not plan(blocks, machines, clusters=1, all_nodes=True).idle
    with pytest.raises(ConfigError, match="rank 0, on the first node, needs another 0.000 MB for checkpoints"):
        plan(blocks, machines, clusters=1, all_nodes=True, collects=True)


def test_greedy_plans_are_close_to_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps = []
    for seed in range(12):
        blocks, machines = case(seed, machines=6, blocks=16, memory=1.5 + seed % 4)
        exact = plan(blocks, machines, average_every=50)
        with monkeypatch.context() as patch:
            patch.setattr(planning, "EXACT_MACHINES", 0)
            found = plan(blocks, machines, average_every=50)
        check(found)
        gaps.append(exact.batches_per_s / found.batches_per_s - 1)
    assert min(gaps) > -1e-9, "the exact plan is not the best"
    assert sorted(gaps)[6] < 0.25


BLOCKS = [Block(name, 10**6, 10**9, seconds=1) for name in ("embed", "layers.0", "head")]


@pytest.mark.parametrize(
    ("memory", "settings", "message"),
    [
        ([0.9e9] * 8, {}, "embed, which is not cut, needs 1.00 GB, and node_0, the largest node, has 0.90 GB"),
        ([1.2e9] * 2, {}, "it needs 3.00 GB in 1 cluster, and the nodes have 2.40 GB; add nodes"),
        (
            [4e9] * 9,
            {"clusters": 2, "all_nodes": True},
            "9 nodes are too many for 3 blocks in 2 clusters; omit --all-nodes, or 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    memory: list[float], settings: dict[str, int], message: str
) -> None:
    machines = [Machine(f"node_{index}", size) for index, size in enumerate(memory)]
    with pytest.raises(ConfigError, match=message):
        plan(BLOCKS, machines, **settings)  # type: ignore[arg-type]


def test_workers_get_the_stages_of_their_machines(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    planfile.write(file, "net", plan(BLOCKS, [Machine(name, 2e9) for name in "abc"], clusters=1, all_nodes=True))
    order = [stage["node"] for stage in json.loads(file.read_text())["clusters"][0]["stages"]]
    assert planfile.layout_for(file, None, ["c", "a", "b"]).ranks == (tuple("cab".index(name) for name in order),)
    assert planfile.layout_for(file, None, [None] * 3).ranks == ((0, 1, 2),)
    assert planfile.layout_for(file, None, ["x", "y", "z"]).ranks == ((0, 1, 2),)  # a plan for other machines
    with pytest.raises(ConfigError, match="is for 3 workers, but the run has 2; set cfg.start_workers=3"):
        planfile.layout_for(file, None, ["c", "a"])
    with pytest.raises(ConfigError, match="but the workers are on a, a, c; plan for those"):
        planfile.layout_for(file, None, ["a", "a", "c"])


def test_files_with_wrong_values_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    planfile.write(file, "net", plan(BLOCKS, [Machine("a", 4e9), Machine("b", 4e9)], clusters=1))
    planfile.read(file)
    change = {"clusters": [{"stages": [{"first": float("inf"), "last": 2}]}]}
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError) as caught:
        planfile.layout_for(file, None, ["a"])
    assert f"cfg.fragments.plan={file} cannot be read (" in str(caught.value)
    assert "stages, item 0: first is inf, not a whole" in str(caught.value)
