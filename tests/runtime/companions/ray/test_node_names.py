"""Names of nodes, and the selectors that place the stages of a plan on them."""

from typing import Any

import pytest

from mlx_runtime.companions.ray.node_names import nodes_with_names, selectors
from mlx_runtime.errors import ClusterError

pytestmark = pytest.mark.pure


def node(number: int, name: str | None = None, **changed: Any) -> dict[str, Any]:
    """Return facts as in `ray.nodes()`."""
    facts = {"NodeID": f"id{number}", "NodeManagerAddress": f"10.0.0.{number}", "Alive": True, "Resources": {"CPU": 1}}
    return {**facts, "Labels": {"node": name} if name else {}, **changed}


def test_names_are_labels_or_addresses() -> None:
    nodes = [node(0, Resources={}), node(1, "a"), node(2), node(3, "b", Alive=False)]
    assert [name for name, _ in nodes_with_names(nodes)] == ["a", "10.0.0.2"]
    with pytest.raises(ClusterError, match="several nodes have the label node=a; start each with another one"):
        selectors(["a"], [*nodes, node(4, "a")], least=1, patient=False)


def test_nodes_are_selected_by_label() -> None:
    """One that has just been lost may be listed as alive, and returns with another id."""
    nodes = [node(1, "a"), node(2), node(3, "b")]
    names = ["a", "10.0.0.2", "b"]
    label_a, label_b = {"node": "a"}, {"node": "b"}
    assert selectors(names, nodes, least=3, patient=False) == [label_a, {"ray.io/node-id": "id2"}, label_b]
    left = [nodes[0], node(2, Alive=False), node(4, "a")]
    assert selectors(names, left, least=3, patient=True) == [label_a, {"node": "10.0.0.2"}, label_b]
    again = [nodes[0], node(5, NodeManagerAddress="10.0.0.2")]
    assert selectors(names, again, least=3, patient=True)[1] == {"ray.io/node-id": "id5"}


def test_the_first_start_wants_the_nodes_of_the_plan() -> None:
    nodes = [node(1, "a"), node(3, "b")]
    with pytest.raises(ClusterError, match="the plan has a stage on node c, but the nodes of the cluster are a, b; "):
        selectors([*"abc"], nodes, least=3, patient=False)
    assert len(selectors([*"abc"], nodes, least=2, patient=False)) == 3
    assert selectors([*"cd"], nodes, least=2, patient=True) == []  # a plan for other machines
