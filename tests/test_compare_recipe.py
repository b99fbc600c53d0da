from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from locant.compare.recipe import Recipe, load_recipe, read_recipe
from tests.compare_runs import table, toml

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
COMPARISONS = [path for path in sorted(RECIPES.glob("*.toml")) if path.stem != "pretrain"]  # see test_pretrain_recipe
TEXT = Path("text.txt")


def every_size() -> list[tuple[Path, str]]:
    """All recipes of the repository at all their sizes; one without sizes as it is written."""
    sizes = {path: tomllib.loads(path.read_text(encoding="utf-8")).get("sizes", {"": {}}) for path in COMPARISONS}
    return [(path, size) for path, names in sizes.items() for size in names]


@pytest.mark.parametrize(("path", "size"), every_size(), ids=lambda one: one.stem if isinstance(one, Path) else one)
def test_every_recipe_in_the_repository_is_valid_at_every_size(path: Path, size: str) -> None:
    recipe = load_recipe(path, size=size)
    assert recipe.name == (f"{path.stem}-{size}" if size else path.stem)
    for part in recipe.parts().values():
        assert len(part.parts()) == 1


@pytest.mark.parametrize(
    "name",
    "huang_mlm huang_squad huang_glue huang_clip huang_long huang_insert tupe tupe_electra tisa".split(),
)
def test_recipes_of_papers_have_both_sizes_and_quote_a_source(name: str) -> None:
    small, whole = (load_recipe(RECIPES / f"{name}.toml", size=size) for size in ("cpu", "paper"))
    assert small == load_recipe(RECIPES / f"{name}.toml") != whole
    assert whole.published == small.published and all(
        "arXiv" in one.source or "/" in one.source for one in whole.published
    )


def test_quickstart_has_the_encodings_and_seeds_that_were_promised() -> None:
    recipe = load_recipe(RECIPES / "quickstart.toml")
    assert {"none", "absolute", "huang_m4", "tisa", "tupe_r"} <= set(recipe.labels)
    assert len(recipe.seeds) == 2
    assert recipe.text.text == "docs"


def test_books_has_every_encoding() -> None:
    names = {choice.name for choice in load_recipe(RECIPES / "books.toml").encodings}
    promised = (
        "none absolute sinusoidal shaw xlnet huang_m1 huang_m2 huang_m3 huang_m4 t5 bert_r bert_ad tisa tupe_a tupe_r"
    )
    assert names >= {*promised.split(), "deberta", "alibi", "rope"}


def test_a_recipe_survives_its_own_dictionary() -> None:
    recipe = read_recipe(table(TEXT, encodings=["none", {"name": "shaw", "label": "shaw-4", "clip": 4}]))
    assert read_recipe(recipe.to_dict()) == recipe
    assert recipe.choice("shaw-4").options == {"clip": 4}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stesp=200", r"unknown key 'stesp' in \[train\]; did you mean 'steps'"),
        ("sedes=[1]", "unknown key 'sedes'; did you mean 'seeds'"),
        ("steps=10", r"unknown key 'steps'; did you mean train\.steps\?"),
        ("model_dim=10", r"unknown key 'model_dim'; did you mean model\.model_dim\?"),
        ("baseline=rope", r"baseline = 'rope' is not among the encodings; known: .*absolute"),
        ("train.steps=many", "train.steps = 'many' is a text, needed an integer"),
        ("train.steps=1.5", "train.steps = 1.5 is a number, needed an integer"),
        ("train.steps=true", "train.steps = True is true/false, needed an integer"),
        ("train.steps=0", r"\[train\] steps = 0, needed at least 1"),
        ("train.length=7", "length = 7, needed at least 8"),
        ("train.checkpoints=4", r"\[train\] checkpoints = 4, needed 0 \(none\) to steps = 3"),
        ("train.checkpoints=-1", "checkpoints = -1, needed 0"),
        ("train.batch_size=-2", "batch_size = -2, needed at least 1"),
        ("train.warmup_fraction=2", "warmup_fraction = 2.0, needed 0 to 1"),
        ("train.learning_rate=0", "learning_rate = 0.0, needed a number above 0"),
        ("train.weight_decay=-1", "weight_decay = -1.0, needed 0 or more"),
        ("train.schedule=lineer", "train.schedule = 'lineer' is not a choice; did you mean 'linear'"),
        ("model.num_heads=3", "num_heads = 3 does not divide model_dim = 8"),
        ("model.num_layers=0", "num_layers = 0, needed at least 1"),
        ("model.dropout=1", "dropout = 1.0, needed 0 <= dropout < 1"),
        ("model.init_std=0", "init_std = 0.0, needed a number above 0"),
        ("model.hidden_dim=-1", r"hidden_dim = -1, needed 0 \(automatic\)"),
        ("model.max_positions=8", "model.max_positions = 8 is less than train.length = 9"),
        ("evaluate.lengths=9,20", "evaluate.lengths has 20, needed multiples of train.length = 9"),
        ("evaluate.lengths=18,36", r"evaluate.lengths = \[18, 36\] lacks train.length = 9"),
        ("evaluate.lengths=9,9", r"lengths = \[9, 9\] names a number twice"),
        ("evaluate.lengths=[0]", "lengths has 0, needed at least 1"),
        ("evaluate.shifts=-3", r"evaluate.shifts = -3 is an integer, needed a list"),
        ("evaluate.shifts=[-3]", "shifts has -3, needed 0 or more"),
        ("evaluate.tokens=0", "tokens = 0, needed at least 1"),
        ("evaluate.validation_fraction=1", "validation_fraction = 1.0, needed a number between 0 and 1"),
        ("measure.rounds=-1", "rounds = -1, needed 0"),
        ("measure.seconds=0", "seconds = 0.0, needed a number above 0"),
        ("measure.threads=-1", "threads = -1, needed 0"),
        ("masking.rate=1", "rate=1.0 must lie between 0 and 1"),
        ("name=../x", r"name = '\.\./x', needed a letter or digit and no slash"),
        ("name=..", r"name = '\.\.', needed a letter"),
        ("seeds=[]", "seeds is empty"),
        ("seeds=1,1", "seeds names '1' twice"),
        ("seeds=-1", "seeds has -1, needed 0 to"),
        ("jobs=0", "jobs = 0, needed at least 1"),
        ("baseline=absolut", "baseline = 'absolut' is not among the encodings; did you mean 'absolute'"),
        ("encodings=[]", "encodings is empty"),
        ("encodings=none,none", "encodings names 'none' twice"),
        ("encodings=none,hunag_m4", "encodings has 'hunag_m4': unknown encoding 'hunag_m4'; did you mean 'huang_m4'"),
        ('encodings=[""]', r"encodings\[0\] has an empty name"),
        ("encodings=[3]", r"encodings\[0\] = 3 is an integer, needed a name"),
        ("encodings=5", r"encodings\[0\] = 5 is an integer"),
        ('encodings=[{label = "x"}]', "lacks a name"),
        ('encodings=[{name = "shaw", label = "-"}]', "label = '-' has no letter or digit"),
        ('encodings=[{name = "shaw", clipp = 4}]', "shaw: unknown option 'clipp'=4; did you mean 'clip'"),
        ('encodings=[{name = "shaw", clip = 0}]', "clip=0"),
        ("train", "override 'train' is not key=value"),
        ("=3", "override '=3' is not key=value"),
        ("train=3", r"train = 3 is an integer, needed a table \[train\]"),
        ("encodings.0.clip=3", "override encodings.0.clip=3, but encodings.0 is a text, not a table"),
        ("encodings.9.clip=3", r"override encodings.9.clip=3, but there are \d, counted from 0"),
        ("train.0.steps=3", "override train.0.steps=3, but train is a table, not a list"),
        ("jobs.x=3", "override jobs.x=3, but jobs is an integer, not a table"),
    ],
)
def test_bad_input_is_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_recipe(table(TEXT, jobs=1), [override])
    assert str(raised.value).startswith("recipe: ")


def test_encodings_must_be_a_list() -> None:
    with pytest.raises(ValueError, match=r"encodings = 'none' is a text, needed a list"):
        read_recipe(table(TEXT, encodings="none"))


def test_a_missing_list_of_encodings_is_named() -> None:
    body = table(TEXT)
    del body["encodings"]
    with pytest.raises(ValueError, match="recipe: lacks 'encodings'; write encodings ="):
        read_recipe(body)


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("train.steps=7", lambda recipe: recipe.train.steps, 7),
        ("train.learning_rate=1e-4", lambda recipe: recipe.train.learning_rate, 1e-4),
        ("train.learning_rate=1", lambda recipe: recipe.train.learning_rate, 1.0),
        ("seeds=[3,5]", lambda recipe: recipe.seeds, (3, 5)),
        ("seeds=3,5", lambda recipe: recipe.seeds, (3, 5)),
        ("seeds=3", lambda recipe: recipe.seeds, (3,)),
        ("text.text=~/a b.txt", lambda recipe: recipe.text.text, "~/a b.txt"),
        ("text.text=a.txt,b.txt", lambda recipe: recipe.text.text, ("a.txt", "b.txt")),
        ("text.limit_mb=2", lambda recipe: recipe.text.limit_mb, 2.0),
        ("masking.whole_word=true", lambda recipe: recipe.masking.whole_word, True),
        ("encodings=none", lambda recipe: recipe.labels, ("none",)),
        ("encodings=tisa,absolute+t5", lambda recipe: recipe.labels, ("tisa", "absolute+t5")),
        ("name=other", lambda recipe: recipe.name, "other"),
    ],
)
def test_an_override_takes_effect(override: str, read, value) -> None:
    assert read(read_recipe(table(TEXT), [override])) == value


def test_an_override_selects_labels_with_their_options() -> None:
    body = table(TEXT, encodings=["none", {"name": "shaw", "label": "short", "clip": 4}, {"name": "shaw", "clip": 2}])
    recipe = read_recipe(body, ["encodings=short,shaw(clip=2),tisa"])
    assert [(choice.name, choice.options) for choice in recipe.encodings] == [
        ("shaw", {"clip": 4}),
        ("shaw", {"clip": 2}),
        ("tisa", {}),
    ]


def test_overrides_do_not_change_the_table_they_come_from() -> None:
    body = table(TEXT)
    read_recipe(body, ["train.steps=7"])
    assert body["train"]["steps"] == 3


def test_an_empty_list_of_lengths_means_one_two_and_four_times() -> None:
    recipe = read_recipe(table(TEXT))
    assert recipe.evaluate.lengths_for(recipe.train.length) == (9, 18, 36)


@pytest.mark.parametrize(("encodings", "baseline"), [(["none", "absolute"], "absolute"), (["tisa", "none"], "tisa")])
def test_the_baseline_is_absolute_where_it_takes_part(encodings: list[str], baseline: str) -> None:
    assert read_recipe(table(TEXT, encodings=encodings)).baseline_label == baseline


def test_a_subset_without_the_baseline_takes_its_own() -> None:
    body = table(TEXT, encodings=["none", "tisa", "alibi"], baseline="none")
    assert read_recipe(body, ["encodings=tisa,none"]).baseline_label == "none"
    assert read_recipe(body, ["encodings=tisa,alibi"]).baseline_label == "tisa"
    with pytest.raises(ValueError, match="baseline = 'none' is not among the encodings"):
        read_recipe(body, ["encodings=tisa,alibi", "baseline=none"])


def test_a_run_is_the_same_run_whatever_else_its_recipe_asks_for() -> None:
    one = read_recipe(table(TEXT))
    more = read_recipe(table(TEXT, encodings=["tisa", "absolute"], seeds=[1, 2], jobs=2))
    assert one.run_key("absolute", 1) == more.run_key("absolute", 1)
    changed = read_recipe(table(TEXT), ["train.steps=4"])
    keys = {
        one.run_key("absolute", 1),
        one.run_key("none", 1),
        more.run_key("absolute", 2),
        changed.run_key("absolute", 1),
    }
    assert len(keys) == 4


def test_a_recipe_file_is_read_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text(toml(table(TEXT)), encoding="utf-8")
    recipe = load_recipe(path, ["seeds=4"])
    assert isinstance(recipe, Recipe)
    assert (recipe.name, recipe.seeds) == ("short", (4,))


def test_a_recipe_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.toml' does not exist"):
        load_recipe(tmp_path / "nowhere.toml")
    with pytest.raises(FileNotFoundError, match="is a folder"):
        load_recipe(tmp_path)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_bytes(b"\xef\xbb\xbf" + b"encodings = ['none']")
    assert load_recipe(path).labels == ("none",)


@pytest.mark.parametrize("content", [b"steps = = 3", b"\xff\xfe"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.toml is not TOML"):
        load_recipe(path)
