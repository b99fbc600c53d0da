"""Numbers made by public code: every case below --golden is checked by who its content names."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from locant.terms import Clip, LogBucket, SignedLogBucket
from tests.golden import (  # noqa: F401  (they register their checks)
    adaptive,
    augmented,
    graph_study,
    hosts,
    length_study,
    locality,
    modules,
    rotary_alibi_t5,
    untied,
)
from tests.golden.attached import ATTACHED
from tests.golden.cases import Case, Comparison, find_cases
from tests.golden.faults import (
    count_from_the_first_key,
    count_keys_backwards,
    forget_degrees,
    number_queries_backwards,
    turn_the_sign_of_offsets,
)
from tests.golden.registry import CHECKS, OUT_OF_REACH, Check, find_check, skip_reason

# What the public code of a case of set C gave; its other tensors are inputs, weights and draws.
C_OUTPUTS = {"out", "pos_emb", "probs", "bucket", "jsd_code", "jsd_standard", "symmetric_kl_code"}
DATA = Path(__file__).with_name("data")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = find_cases(metafunc.config.option.golden).cases
        runs = [(case, find_check) for case in cases] + [
            (case, find_attached) for case in cases if case.key in ATTACHED
        ]
        names = [case.id if find is find_check else f"{case.id}-attached" for case, find in runs]
        metafunc.parametrize(("case", "find"), runs, ids=names)


def find_attached(case: Case) -> Check:
    """The whole model of a case, with locant attached."""
    return ATTACHED[case.key]


def verified(case: Case, find: Callable[[Case], Check] = find_check) -> set[str]:
    """Run a case's check; the names of the golden tensors that were compared."""
    names = set()
    for comparison in find(case)(case):
        comparison.verify()
        names.add(comparison.name.split(" (")[0])
    return names


def left_out(case: Case, compared: set[str], waived: tuple[str, ...]) -> set[str]:
    """Outputs that nobody compared and nobody declared out of reach."""
    if case.key[0] == "C":
        stored = {name for name in case.tensors if name.rsplit("/", 1)[-1] in C_OUTPUTS}
    elif case.key[0] == "B":
        inputs = {"tokens", "upstream", "offsets", "relative_position"}
        stored = {name for name in case.tensors if name not in inputs and not name.startswith("param.")}
    else:
        stored = set(case.outputs)
    return {n for n in stored - compared if not any(fnmatch.fnmatchcase(n, pattern) for pattern in waived)}


def test_locant_gives_the_golden_numbers(case, find):
    if (reason := skip_reason(case)) is not None:
        pytest.skip(reason)
    compared = verified(case, find)
    assert compared
    waived = OUT_OF_REACH[case.key] if find is find_check else ("embedding_output",)
    assert left_out(case, compared, waived) == set()


# Nothing is lost on the way


def test_the_folder_holds_cases_and_no_stray_files(golden_dir):
    found = find_cases(golden_dir)
    assert found.cases, f"no golden case below {golden_dir}"
    assert found.strays == []


def test_every_check_has_a_case_in_the_default_folder():
    assert CHECKS.keys() <= FIRST.keys()
    assert ATTACHED.keys() <= CHECKS.keys()


def test_a_case_of_an_unknown_class_fails_and_names_it(tmp_path):
    (tmp_path / "bert_absolute.json").write_text(json.dumps({"library": "transformers", "class": "BortModel"}))
    (tmp_path / "index.json").write_text(json.dumps([{"kind": "tuple", "file": "tupe_A.safetensors"}]))
    for folder, message in ((tmp_path, r"nobody checks B \| tuple"), (tmp_path, r"transformers \| BortModel")):
        (case,) = find_cases(folder).cases
        assert skip_reason(case) is None
        with pytest.raises(LookupError, match=message):
            verified(case)
        (tmp_path / "index.json").unlink(missing_ok=True)


def test_a_file_is_dispatched_on_what_it_holds(tmp_path):
    for suffix in (".json", ".safetensors"):
        (tmp_path / f"whatever{suffix}").write_bytes((DATA / "A" / f"xt_absolute{suffix}").read_bytes())
    (tmp_path / "stray.safetensors").write_bytes(b"")
    found = find_cases(tmp_path)
    assert found.strays == [f"{tmp_path.name}/stray.safetensors"]
    assert verified(found.cases[0]) == {"embedding", "embedding_left_padded"}


def test_an_output_that_nobody_compares_is_noticed():
    (case,) = (case for case in find_cases(DATA).cases if case.id.endswith("/xt_absolute"))
    compared = verified(case)
    assert left_out(case, compared, ()) == set()
    assert left_out(case, compared - {"embedding"}, ()) == {"embedding"}
    assert left_out(case, compared - {"embedding"}, ("embed*",)) == set()


def test_set_c_is_skipped_by_group(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps({"maps": {"repo": "a/b", "files": ["maps.safetensors"]}}))
    save_file({"x": torch.zeros(1)}, tmp_path / "maps.safetensors")
    (case,) = find_cases(tmp_path).cases
    assert skip_reason(case) == "golden: set C (maps) comes with the issue on the rest of the field"


# The checks can fail: each one is shown a locant with a fault

MATRICES = {("B", "locality_symmetry")}
CONTENTS = {("x-transformers", "CoPE")}  # reads no ids
GRAPHS = {("C", "graph")}  # neither
TABLES = {
    ("transformers", "T5Attention._relative_position_bucket"),
    ("transformers", "make_log_bucket_position"),
    ("B", "t5_bucket"),
}
FIRST = {case.key: case for case in reversed(find_cases(DATA).cases) if case.key in CHECKS}


@pytest.mark.parametrize("key", CHECKS, ids=" | ".join)
def test_a_fault_fails_every_check(key, monkeypatch):
    verified(FIRST[key])
    plant = turn_the_sign_of_offsets if key in TABLES else number_queries_backwards
    plant = count_from_the_first_key if key in CONTENTS else plant
    plant = forget_degrees if key in GRAPHS else plant
    (count_keys_backwards if key in MATRICES else plant)(monkeypatch)
    with pytest.raises(AssertionError, match=r"Tensor-likes are not"):
        verified(FIRST[key])


@pytest.mark.parametrize("key", ATTACHED, ids=" | ".join)
def test_a_fault_fails_every_attached_model(key, monkeypatch):
    number_queries_backwards(monkeypatch)
    with pytest.raises(AssertionError, match=r"Tensor-likes are not close"):
        verified(FIRST[key], find_attached)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("bert_relative_key", Clip),
        ("bert_relative_key_query", Clip),
        ("shaw_key_clipped", Clip),
        ("xlnet_bi", Clip),
        ("deberta_v1_c2p_p2c", SignedLogBucket),
        ("t5_encoder", LogBucket),
    ],
)
def test_the_sign_of_the_offset_matters(name, rule, monkeypatch):
    (case,) = (case for case in find_cases(DATA).cases if case.id.endswith(f"/{name}"))
    turn_the_sign_of_offsets(monkeypatch, (rule,))
    with pytest.raises(AssertionError, match=r"Tensor-likes are not close"):
        verified(case)


def test_comparisons_of_integers_are_exact():
    Comparison("rows", torch.tensor([3, 5]), torch.tensor([3, 5], dtype=torch.int32)).verify()
    with pytest.raises(AssertionError, match=r"rows \(by sdpa\): Tensor-likes are not equal"):
        Comparison("rows (by sdpa)", torch.tensor([3, 5]), torch.tensor([3, 6]), atol=2, rtol=2).verify()
