"""The nine GLUE tasks: every layout of their files is read, and what is malformed is refused by file, row and field."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from locant.finetune.classification import Classification
from locant.finetune.glue import TASKS, GlueData, read_glue
from locant.finetune.load import DataChoice, read_task, settings_kind, task_names
from locant.finetune.settings import GlueSettings, SquadSettings
from tests.finetune_runs import tokenizer, write_rte, write_squad

COLUMNS = {  # the header line of each file of the GLUE download
    "sst-2": "sentence\tlabel",
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "sts-b": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
    "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
    "mnli": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
    "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
    "qnli": "index\tquestion\tsentence\tlabel",
    "rte": "index\tsentence1\tsentence2\tlabel",
    "wnli": "index\tsentence1\tsentence2\tlabel",
}


def row(name: str, *texts: str, label: str) -> str:
    task = TASKS[name]
    cells = dict(zip(task.text, texts, strict=True)) | {task.label: label}
    return "\t".join(cells.get(column, "7") for column in COLUMNS[name].split("\t"))


def write(folder: Path, name: str, *lines: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", COLUMNS)
def test_every_table_is_read_with_quotes_left_alone(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    texts = ('He said "no', "An a")[: len(task.text)]
    labels = task.labels or ("0.0", "3.25", "5.0")
    lines = [COLUMNS[name], *(row(name, *texts, label=label) for label in labels)]
    for file in ("train.tsv", *(names[0] for _, names in task.dev)):
        write(tmp_path / task.folder, file, *lines)
    data = read_glue(task, tmp_path)
    assert data == read_glue(task, tmp_path / task.folder), "the task's own folder is found, too"
    assert [example.label for example in data.train] == (list(range(len(labels))) if task.labels else [0.0, 3.25, 5.0])
    assert all(example.texts == texts for example in data.train)
    assert data.train[0].id == "train.tsv:2" and list(data.dev) == [dev for dev, _ in task.dev]
    assert all(len(examples) == len(labels) for examples in data.dev.values())


def test_cola_is_read_as_it_was_released(tmp_path: Path) -> None:
    write(tmp_path, "in_domain_train.tsv", "gj04\t1\t\tFish rowed.", "gj04\t0\t*\tRowed the.")
    (tmp_path / "in_domain_dev.tsv.gz").write_bytes(gzip.compress(b"gj04\t0\t*\tSea the.\n"))
    data = read_glue(TASKS["cola"], tmp_path)
    assert [(example.texts, example.label) for example in data.train] == [(("Fish rowed.",), 1), (("Rowed the.",), 0)]
    assert data.dev["dev"][0].texts == ("Sea the.",) and data.files[1].name == "in_domain_dev.tsv.gz"


def test_json_lines_are_read_with_the_numbers_of_classes(tmp_path: Path) -> None:
    lines = [json.dumps({"premise": "a sea", "hypothesis": "wet", "label": label}) for label in (2, 0)]
    write(tmp_path, "mnli.valid.jsonl", *lines, "")
    (tmp_path / "mnli-mm.valid.jsonl.xz").write_bytes(lzma.compress(lines[1].encode()))
    data = read_glue(TASKS["mnli"], tmp_path)
    assert data.train == () and [example.label for example in data.dev["matched"]] == [2, 0]
    assert data.dev["mismatched"][0].texts == ("a sea", "wet")


def test_cut_off_rows_are_counted_for_the_task_whose_download_has_them(tmp_path: Path) -> None:
    whole = row("qqp", "who?", "what?", label="1")
    write(tmp_path, "dev.tsv", COLUMNS["qqp"], whole, "7\t7\t7\twho", whole)
    data = read_glue(TASKS["qqp"], tmp_path)
    assert len(data.dev["dev"]) == 2 and data.notices == ("dev.tsv: 1 rows that are cut off were left out",)


GOOD = row("rte", "sea", "boat", label="entailment")
BAD = {
    "no column": (["index\tsentence1\tsentence\tlabel", GOOD], r"and no 'sentence2'; did you mean 'sentence'"),
    "too few fields": ([COLUMNS["rte"], GOOD, "1\tsea\tboat"], r"line 3: 3 fields came, needed 4 \(index, "),
    "label": (
        [COLUMNS["rte"], row("rte", "a", "b", label="neutral")],
        r"line 2: field 'label' holds 'neutral', needed ",
    ),
    "text": ([COLUMNS["rte"], row("rte", "a", " ", label="entailment")], r"line 2: field 'sentence2' is empty"),
    "column twice": (["index\tsentence1\tsentence2\tlabel\tlabel", GOOD], r"has 2 columns 'label', needed one"),
    "nothing": ([COLUMNS["rte"]], r"dev.tsv holds no example"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_table_is_refused_by_file_row_and_field(case: str, tmp_path: Path) -> None:
    lines, words = BAD[case]
    with pytest.raises(ValueError, match=f"glue/rte: .*dev.tsv.*{words}" if case != "nothing" else words):
        read_glue(TASKS["rte"], write(tmp_path, "dev.tsv", *lines))


@pytest.mark.parametrize("score", ["5.1", "-0.5", "nan", "high", ""])
def test_a_score_that_is_none_is_refused(score: str, tmp_path: Path) -> None:
    write(tmp_path, "dev.tsv", COLUMNS["sts-b"], row("sts-b", "a", "b", label=score))
    with pytest.raises(ValueError, match=rf"line 2: field 'score' holds '{score}', needed a number from 0 to 5"):
        read_glue(TASKS["sts-b"], tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"line 1: not JSON \("),
        ("[1]", r"line 1: field 'premise' is missing in list"),
        ('{"premise": "a", "label": 1}', r"field 'hypothesis' is missing in premise, label"),
        ('{"premise": "a", "hypothesis": 3, "label": 1}', r"field 'hypothesis' holds 3, needed a text"),
        ('{"premise": "a", "hypothesis": "b", "label": 3}', r"field 'label' holds 3, needed one of 0, 1, 2 \(entail"),
        ('{"premise": "a", "hypothesis": "b", "label": true}', r"field 'label' holds True"),
        (r'{"premise": "a \ud83d", "hypothesis": "b", "label": 1}', r"line 1: field 'premise' holds '.+', half of a"),
        ('{"premise": "a", "hypothesis": "b", "label": 1.5}', r"field 'label' holds 1.5"),
    ],
)
def test_a_malformed_line_is_refused_by_file_row_and_field(line: str, words: str, tmp_path: Path) -> None:
    write(tmp_path, "mnli.valid.jsonl", line)
    write(tmp_path, "mnli-mm.valid.jsonl", line)
    with pytest.raises(ValueError, match=rf"glue/mnli: .*mnli.valid.jsonl, {words}" if "line" in words else words):
        read_glue(TASKS["mnli"], tmp_path)


def test_missing_folders_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"glue/rte: no folder '.*nowhere'; .*RTE in it"):
        read_glue(TASKS["rte"], tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"has no dev file \(dev_matched.tsv or mnli.valid.jsonl"):
        read_glue(TASKS["mnli"], tmp_path)


def problem(data: GlueData, name: str = "rte", length: int = 64, **settings: float) -> Classification:
    return Classification(TASKS[name], data, tokenizer(), GlueSettings(**settings), length, True)


def test_long_pairs_are_cut_with_a_notice_and_examples_are_drawn_once(tmp_path: Path) -> None:
    data = read_glue(TASKS["rte"], write_rte(tmp_path))
    whole = problem(data)
    cut = problem(data, length=13, train_examples=11, dev_examples=7)
    assert not whole.notices and max(len(f.input_ids) for f in cut.train) == 13
    assert (
        len(cut.train) == 11
        and len(cut.dev["dev"]) == 7
        and "of 11 examples are longer than length = 13" in cut.notices[0]
    )
    assert [f.id for f in cut.train] == [f.id for f in problem(data, train_examples=11).train]
    assert whole.majority == 0 and whole.config["num_labels"] == 2
    with pytest.raises(ValueError, match=r"glue/rte: length = 4, needed at least 5: 3 special tokens and one of each"):
        problem(data, length=4)
    assert len(problem(data, length=5).train[0].input_ids) == 5
    with pytest.raises(ValueError, match=r"train_examples = 38, but there are 37"):
        problem(data, train_examples=38)


def test_labels_of_one_kind_are_refused_in_training_and_told_in_dev(tmp_path: Path) -> None:
    data = read_glue(TASKS["rte"], write_rte(tmp_path))
    ones = tuple(example for example in data.train if example.label == 0)
    with pytest.raises(ValueError, match=rf"glue/rte: all {len(ones)} training examples have the label 0, needed"):
        problem(GlueData(ones, data.dev, data.files, ()))
    told = problem(GlueData(data.train, {"dev": ones}, data.files, ())).notices
    assert told == [f"dev: all {len(ones)} examples have the label 0, so correlations say nothing here"]


def test_a_dev_file_is_split_only_where_there_is_nothing_else(tmp_path: Path) -> None:
    both = read_glue(TASKS["rte"], write_rte(tmp_path))
    with pytest.raises(ValueError, match=r"split_dev = 0.5, but there is a training file \(train.tsv\)"):
        problem(both, split_dev=0.5)
    (tmp_path / "train.tsv").unlink()
    alone = read_glue(TASKS["rte"], tmp_path)
    with pytest.raises(
        ValueError, match=r"no training file \(train.tsv or train.jsonl\) beside dev.tsv; .*split_dev=0.8"
    ):
        problem(alone)
    with pytest.raises(ValueError, match=r"split_dev = 0.01 of 19 examples leaves nothing to train on"):
        problem(alone, split_dev=0.01)
    split = problem(alone, split_dev=0.6)
    ids = [{f.id for f in split.train}, {example.id for example in split.dev["dev"]}]
    assert [len(some) for some in ids] == [11, 8] and not ids[0] & ids[1]


def test_tasks_and_their_data_are_named(tmp_path: Path) -> None:
    assert (
        len(task_names()) == 10
        and settings_kind("squad") is SquadSettings
        and settings_kind("glue/rte") is GlueSettings
    )
    with pytest.raises(ValueError, match=r"unknown task 'glue/rt'; did you mean 'glue/rte'"):
        settings_kind("glue/rt")
    with pytest.raises(ValueError, match=r"glue/rte: nothing came, needed one folder"):
        read_task("glue/rte", DataChoice(()))
    train, dev = write_squad(tmp_path / "train.json"), write_squad(tmp_path / "dev.json", seed=1)
    with pytest.raises(ValueError, match=r"squad: 1 training and 0 dev files came"):
        read_task("squad", DataChoice((train,)))
    with pytest.raises(ValueError, match=r"dev files of one name came \(dev.json, dev.json\)"):
        read_task("squad", DataChoice((train,), (dev, write_squad(tmp_path / "b" / "dev.json", seed=2))))
    with pytest.raises(
        ValueError, match=r"13 questions are in several of the training files .*train.json, .*train-0, "
    ):
        read_task("squad", DataChoice((train, train), (dev,)))
    with pytest.raises(ValueError, match=r"13 questions of train are in the training files, too \(train-0, "):
        read_task("squad", DataChoice((train,), (train,)))
    task = read_task("squad", DataChoice((train,), (dev,)))
    assert len(task.squad_train) == 13 and list(task.squad_dev or {}) == ["dev"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch_size = 0, needed at least 1"),
        ({"length": -1}, r"length = -1, needed 0 \(automatic\) or more"),
        ({"batch_size": 9, "accumulate": 2}, "accumulate = 2 does not divide batch_size = 9"),
        ({"epochs": 0.0}, "epochs = 0.0, needed a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate = nan, needed a number above 0"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1, needed 0 or more"),
        ({"warmup_fraction": 1.5}, "warmup_fraction = 1.5, needed 0 to 1"),
        ({"split_dev": 1.0}, "split_dev = 1.0, needed a share below 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GlueSettings(**settings)


ROWS = {  # of the copies that are used here: (training examples, examples of the dev sets)
    "cola": (8551, 527),
    "sst-2": (67349, 872),
    "mrpc": (3667, 408),
    "sts-b": (5749, 1500),
    "qqp": (0, 20215),
    "mnli": (0, 4908, 4916),
    "qnli": (0, 5087),
    "rte": (2490, 277),
    "wnli": (635, 71),
}


@pytest.mark.skipif("LOCANT_DATA" not in os.environ, reason="data: LOCANT_DATA is not set")
@pytest.mark.parametrize("name", ROWS)
def test_the_real_files_are_read_whole(name: str) -> None:
    data = read_glue(TASKS[name], Path(os.environ["LOCANT_DATA"]) / "glue")
    assert (len(data.train), *map(len, data.dev.values())) == ROWS[name] and not data.notices
