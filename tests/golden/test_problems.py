"""Set C, numbers and strings without tensors: the examples of the length study, and which graphs can be told apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from locant import graphs
from locant.lengthgen import PROBLEMS, SCRATCHPADS, Example, write_pcfg, write_scan
from tests.golden.test_golden import DATA

OURS = {
    "copy/repeat_single_char": "copy_rsc",
    "copy/repeat_single_2x_char": "copy_rsc2x",
    "copy/repeat_double_char": "copy_rdc",
    "copy/copy_multi_char": "copy_cmc",
    "copy/copy_multi_char_2x": "copy_cmc2x",
    "reverse/multi_char": "reverse_mc",
    "reverse/multi_char_2x": "reverse_mc2x",
    "reverse/multi_char_rev_cop": "reverse_mcrv",
    "count/multi_char_mod10": "count",
    "sum": "summation",
    "poly": "polynomial",
    "sort/single_token": "sort_single",
    "sort/multi_digit": "sort_multi",
}


def described(folder: Path, key: str) -> Iterator[dict[str, Any]]:
    """Every JSON file below a folder that has this key."""
    for path in sorted(folder.rglob("*.json")):
        body = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(body, dict) and key in body:
            yield body


def tasks(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    return [(name, task) for body in described(folder, "tasks") for name, task in body["tasks"].items()]


def written(name: str, raw: dict[str, Any], form: str) -> Example:
    """Our prompt and target for a raw example."""
    if name in ("scan", "pcfg"):
        return write_scan(raw, form == "with_bos") if name == "scan" else write_pcfg(raw)
    problem = PROBLEMS[OURS.get(name, name)]
    pad = SCRATCHPADS[form.removeprefix("scratchpad_")]
    return problem.format(raw, pad) if problem.scratchpad else problem.format(raw)


def test_every_prompt_and_target_is_the_public_one(golden_dir):
    found = tasks(golden_dir)
    if not found:
        pytest.skip("golden: no examples of the length study in this folder")
    compared = 0
    for name, task in found:
        for stored in task["examples"]:
            for form in stored.keys() - {"length", "raw"}:
                ours = written(name, stored["raw"], form)
                assert (ours.prompt, ours.target) == (stored[form]["prompt"], stored[form]["target"]), f"{name} {form}"
                if "length" in stored:
                    length = tuple(stored["length"]) if isinstance(stored["length"], list) else stored["length"]
                    assert ours.length == length
                compared += 1
    assert compared >= 20 * len(found) / 2


def test_counts_are_taken_modulo_ten(golden_dir):
    for name, task in tasks(golden_dir):
        for stored in task["examples"] if name.startswith("count/") else ():
            assert PROBLEMS["count"].format(stored["raw"]).target == str(stored["length"] % 10)


def test_a_wrong_format_is_noticed():
    ((_, task),) = [(n, t) for n, t in tasks(DATA) if n == "addition"]
    stored = task["examples"][5]
    short = written("addition", stored["raw"], "scratchpad_no_input")
    assert short.target != stored["scratchpad_full"]["target"]
    assert "  " in stored["scratchpad_full"]["target"]  # double spaces on purpose


def test_facts_about_pairs_of_graphs(golden_dir):
    found = list(described(golden_dir, "pairs_distinguished"))
    if not found:
        pytest.skip("golden: no facts about graphs in this folder")
    known = {
        "cycle6": nx.cycle_graph(6),
        "two triangles": nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(3)),
        "rook4x4": nx.line_graph(nx.complete_bipartite_graph(4, 4)),
        "shrikhande": shrikhande(),
    }
    known |= {f"csl41 skip{s}": nx.circulant_graph(41, [1, s]) for s in range(2, 20)}
    for body in found:
        skips = body["csl41_skips"]
        csl = [nx.circulant_graph(41, [1, s]) for s in skips]
        for encoding, count in body["csl41_distinct_row_multisets"].items():
            assert len(graphs.classes(csl, encoding)) == count, encoding
        groups = [sorted(skips[i] for i in one) for one in graphs.classes(csl, "shortest_path")]
        assert sorted(groups) == sorted(body["csl41_groups_sharing_the_same_shortest_path_multiset"])
        for pair, facts in body["pairs_distinguished"].items():
            names = pair.split(" vs ")
            other = names[1] if names[1] in known else f"csl41 {names[1]}"
            first, second = known[names[0]], known[other]
            assert nx.is_isomorphic(first, second) == facts["isomorphic"]
            assert graphs.one_wl(first, second) == facts["1-WL"]
            for fact in facts.keys() - {"isomorphic", "1-WL"}:
                assert graphs.separates(first, second, fact.removesuffix("-augWL")) == facts[fact], f"{pair}: {fact}"


def shrikhande() -> nx.Graph:
    """The Cayley graph of Z4 x Z4 with +-(0,1), +-(1,0), +-(1,1)."""
    steps = [(0, 1), (1, 0), (1, 1)]
    edges = [((a, b), ((a + x) % 4, (b + y) % 4)) for a in range(4) for b in range(4) for x, y in steps]
    return nx.convert_node_labels_to_integers(nx.Graph(edges))
