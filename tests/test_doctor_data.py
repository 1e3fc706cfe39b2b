"""The doctor's rules about prompt data, on files as they lie there and the launches that read them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from doctor_machine_kit import launch
from findings_kit import told, tried
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from repro.doctor.artefacts.kinds import Launch, PromptData
from repro.doctor.artefacts.prompts import LONGEST, PROMPTS
from repro.doctor.facts.samples.prompt_survey import keys_of, survey
from repro_golden.base.errors import ReproError

GOOD = [{"prompt": f"What is {k} + {k}?", "label": str(2 * k)} for k in range(20)]
FLAGS = "--input-key prompt --label-key label"

Case = tuple[object, ...]


def parquet(path: Path, rows: list[dict[str, Any]], **options: str) -> Path:
    """A Parquet file of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def written(path: Path, rows: Iterable[object]) -> PromptData:
    """A JSONL file of rows (bytes stand for a line as it is), read."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return read(path)


def read(path: Path) -> PromptData:
    """The one artefact of a file."""
    assert PROMPTS.fits(path)
    (data,) = PROMPTS.read(path)
    assert isinstance(data, PromptData)
    return data


def reading(folder: Path, flags: str = FLAGS, data: str = "train.jsonl", root: str = "slime") -> Launch:
    """A launch script that reads a file of this name."""
    return launch(folder, f"--prompt-data /data/{data} {flags}", root=root)


def case(rows: Iterable[object], flags: str = FLAGS) -> Callable[[Path], Case]:
    """A file of rows, and a launch script that reads it."""
    return lambda folder: (written(folder / "train.jsonl", rows), reading(folder, flags))


MARKED = [{"prompt": f"<|im_start|>user\n{k}<|im_end|>\n<|im_start|>assistant\n", "label": "1"} for k in range(4)]
LONG = [{"prompt": "word " * 4000, "label": "1"}]


def test_a_good_file_alone_is_let_pass(tmp_path: Path) -> None:
    """By every rule that can do without a launch."""
    assert not tried(written(tmp_path / "train.jsonl", GOOD))


class TestFormat:
    """Lines that slime and Miles drop, and lines that they fail on: "data-format"."""

    @pytest.mark.parametrize(
        ("line", "severity", "message"),
        [
            (b'{"prompt": "caf\xe9"}', "error", "no UTF-8"),
            (b'["a", "b"]', "error", "a list, no object"),
            (b'"text"', "error", "a str, no object"),
            (b"{'prompt': 'a'}", "warning", "no JSON"),
            (b'{"prompt": ' + b"[" * 20000, "warning", "no JSON"),
            (b'{"n": 1' + b"0" * 5000 + b"}", "warning", "no JSON"),
        ],
    )
    def test_each_kind(self, line: bytes, severity: str, message: str, tmp_path: Path) -> None:
        """A dropped line is a warning; one that fails the loader is an error."""
        (finding,) = told("data-format", written(tmp_path / "a.jsonl", [*GOOD, line]), None)
        assert finding.severity == severity and message in finding.message and finding.where.line == 21

    def test_a_byte_order_mark_costs_the_first_row(self, tmp_path: Path) -> None:
        """The loaders read it as part of the first line, which is then no JSON."""
        (finding,) = told(
            "data-format", written(tmp_path / "a.jsonl", [b"\xef\xbb\xbf" + json.dumps(GOOD[0]).encode(), *GOOD]), None
        )
        assert finding.where.line == 1 and "BOM" in finding.message

    def test_many_are_counted(self, tmp_path: Path) -> None:
        """Five lines, then their number."""
        findings = told("data-format", written(tmp_path / "a.jsonl", [*GOOD, *([b"{"] * 300)]), None)
        assert len(findings) == 6 and "300 lines of 320" in findings[-1].message

    def test_a_line_without_an_end_is_bounded(self, tmp_path: Path) -> None:
        """A line of more than the bound is told and passed over; what follows is read."""
        path = tmp_path / "a.jsonl"
        with path.open("wb") as file:
            file.write(json.dumps(GOOD[0]).encode() + b"\n")
            file.seek(LONGEST + 4096, os.SEEK_CUR)
            file.write(b"\n" + json.dumps(GOOD[1]).encode() + b"\n")
        rows = list(read(path).rows())
        assert [number for number, _ in rows] == [1, 2, 3]
        assert "longer than" in str(rows[1][1]) and rows[2][1] == GOOD[1]

    @given(st.lists(st.binary(max_size=60), max_size=8))
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_bytes_are_rows_or_reasons(self, tmp_path: Path, lines: list[bytes]) -> None:
        """No rule raises on a file of any lines, and the lines are numbered as an editor does."""
        path = tmp_path / "any.jsonl"
        path.write_bytes(b"\n".join([json.dumps(GOOD[0]).encode(), *lines]))
        PROMPTS.fits(path)
        (data,) = PROMPTS.read(path)
        assert isinstance(data, PromptData)
        assert all(number <= path.read_bytes().count(b"\n") + 1 for number, _ in data.rows())
        everything(data, None)

    @given(
        st.lists(
            st.dictionaries(
                st.sampled_from(["prompt", "label", "messages", "role"]),
                st.recursive(
                    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
                    lambda c: (
                        st.lists(c, max_size=3)
                        | st.dictionaries(st.sampled_from(["role", "content", "text", "type"]), c)
                    ),
                ),
            )
        )
    )
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_values_are_looked_at(self, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
        """No rule raises on rows of any types, with a launch that reads them or without."""
        path = tmp_path / "train.jsonl"
        path.write_text("\n".join(map(json.dumps, [GOOD[0], *rows])))
        survey.cache_clear()
        (data,) = PROMPTS.read(path)
        everything(data, None)
        everything(data, reading(tmp_path, f"{FLAGS} --apply-chat-template --rollout-max-prompt-len 1"))


def everything(data: object, read: Launch | None) -> None:
    """Try every rule on what there is."""
    tried(*[artefact for artefact in (data, read) if artefact is not None])


class TestKeys:
    """Which keys are read, and which are meant: "data-keys"."""

    @pytest.mark.parametrize(
        ("flags", "rows", "message", "fix"),
        [
            ("--label-key label", GOOD, "--input-key is not given, so 'input' is read", "--input-key prompt"),
            ("--input-key Prompt", GOOD, "--input-key is 'Prompt'", "--input-key prompt"),
            ("--input-key propmt", GOOD, "no row has it", "--input-key prompt"),
            ("--input-key prompt --label-key answer", GOOD, "--label-key is 'answer'", "--label-key label"),
            (FLAGS, [*GOOD, {"prompt": "?"}], "1 of 21 rows lack it", ""),
            (
                "--input-key text",
                [{"problem": "a", "answer": "b"}],
                "rows have 'problem', 'answer'",
                "--input-key problem",
            ),
        ],
    )
    def test_what_is_missing_and_what_was_meant(
        self, flags: str, rows: list[object], message: str, fix: str, tmp_path: Path
    ) -> None:
        """A typo's neighbour, another case, or what such a field is commonly called."""
        (finding,) = told("data-keys", written(tmp_path / "train.jsonl", rows), reading(tmp_path, flags))
        assert finding.severity == "error" and message in finding.message and (not fix or finding.fix == fix)

    def test_another_file_is_not_judged_by_this_launch(self, tmp_path: Path) -> None:
        """The launch reads train.jsonl, and this is another."""
        other = written(tmp_path / "other.jsonl", [{"question": "a", "gold": "b"}])
        assert told("data-keys", other, reading(tmp_path)) == []

    def test_a_file_that_only_a_shell_knows_is_possible(self, tmp_path: Path) -> None:
        """`$DATA/train.jsonl` has a name; `$DATA` alone has none, and the finding is no error."""
        data = written(tmp_path / "mine.jsonl", GOOD)
        unknown = launch(tmp_path, "--prompt-data $DATA --input-key propmt")
        (finding,) = told("data-keys", data, unknown)
        assert (finding.severity, finding.certainty) == ("warning", "possible")

    def test_a_slice_names_the_file(self, tmp_path: Path) -> None:
        """`train.jsonl@[0:100]` is train.jsonl."""
        data = written(tmp_path / "train.jsonl", GOOD)
        assert keys_of(reading(tmp_path, FLAGS, "train.jsonl@[0:100]"), data).sure

    def test_data_of_an_evaluation_has_keys_of_its_own(self, tmp_path: Path) -> None:
        """`--eval-input-key` where it is given, else the trainer's."""
        flags = f"{FLAGS} --eval-prompt-data aime /data/aime.jsonl --eval-input-key problem"
        aime = written(tmp_path / "aime.jsonl", [{"problem": "a", "label": "b"}])
        keys = keys_of(reading(tmp_path, flags), aime)
        assert (keys.prompt, keys.label, keys.sure, keys.evaluation) == ("problem", "label", True, True)
        assert told("data-keys", aime, reading(tmp_path, flags)) == []
        assert told("data-too-few", aime, reading(tmp_path, f"{flags} --rollout-batch-size 32")) == []

    @pytest.mark.parametrize(
        ("prompt", "flags", "message"),
        [
            ([{"role": "user", "content": "a"}], "--apply-chat-template", ""),
            ("a", "--apply-chat-template", ""), ("a", "", ""),
            ([{"role": "user", "content": "a"}], "", "--apply-chat-template is not given"),
            ([{"role": "user", "content": "a"}], "--custom-generate-function-path mine.generate", ""),
            (["a", "b"], "--apply-chat-template", "a prompt is a list"), ({"text": "a"}, "", "a prompt is a dict"),
            (3, "", "a prompt is a int"),
        ],
    )  # fmt: skip
    def test_shapes_of_prompts(self, prompt: object, flags: str, message: str, tmp_path: Path) -> None:
        """Text or messages; messages need a template, unless a function of the user's takes them."""
        data = written(tmp_path / "train.jsonl", [{"prompt": prompt, "label": "b"}])
        findings = told("data-keys", data, reading(tmp_path, f"{FLAGS} {flags}"))
        assert [message in finding.message for finding in findings] == ([True] if message else [])


class TestOthers:
    """Boundaries of the other rules."""

    def test_without_a_launch_a_templated_file_is_a_note(self, tmp_path: Path) -> None:
        """What not to do with it is said by "data-already-templated" all the same."""
        (finding,) = told("data-already-templated", written(tmp_path / "a.jsonl", MARKED), None)
        assert finding.severity == "note" and "--apply-chat-template" in finding.fix

    def test_a_marker_in_one_of_many_prompts_is_a_warning(self, tmp_path: Path) -> None:
        """A question about templates is no templated file."""
        data = written(tmp_path / "train.jsonl", [*GOOD, MARKED[0]])
        (finding,) = told("data-already-templated", data, reading(tmp_path, f"{FLAGS} --apply-chat-template"))
        assert finding.severity == "warning" and "1 of 21" in finding.message

    def test_markers_inside_messages_count(self, tmp_path: Path) -> None:
        """Of their contents, also where those come in parts."""
        text = "<start_of_turn>user\nhi<end_of_turn>"
        rows = [
            {"messages": [{"role": "user", "content": text}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        ]
        data = written(tmp_path / "train.jsonl", rows)
        read = reading(tmp_path, "--input-key messages --apply-chat-template")
        (finding,) = told("data-already-templated", data, read)
        assert finding.severity == "error" and "2 of 2" in finding.message

    def test_an_image_is_no_empty_prompt(self, tmp_path: Path) -> None:
        """A message may hold an image alone: "data-empty-prompt" says nothing of it; of an empty one it does."""
        image = {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}
        empty = {"prompt": [{"role": "user", "content": ""}]}
        (finding,) = told("data-empty-prompt", written(tmp_path / "a.jsonl", [image, empty, {"prompt": []}]), None)
        assert "2 of 3" in finding.message and finding.where.line == 2

    def test_a_few_repeats_in_many_are_let_pass(self, tmp_path: Path) -> None:
        """Less than a hundredth is no finding; more than half is a warning: "data-duplicate-prompts"."""
        rows = [{"prompt": str(k)} for k in range(300)]
        few = written(tmp_path / "few.jsonl", [*rows, rows[0]])
        most = written(tmp_path / "most.jsonl", [rows[0]] * 9 + rows[1:4])
        assert told("data-duplicate-prompts", few, None) == []
        assert [finding.severity for finding in told("data-duplicate-prompts", most, None)] == ["warning"]

    def test_an_unread_label_may_be_empty(self, tmp_path: Path) -> None:
        """Without --label-key no label is read."""
        data = written(tmp_path / "train.jsonl", [*GOOD, {"prompt": "?", "label": ""}])
        assert told("data-empty-label", data, reading(tmp_path, "--input-key prompt")) == []
        assert [finding.severity for finding in told("data-empty-label", data, None)] == ["note"]

    def test_tokens_are_counted_by_the_tokenizer(self, tmp_path: Path) -> None:
        """With a tokenizer at hand "data-too-long" is exact, also where characters tell nothing."""
        from tokenizers import Tokenizer, models, pre_tokenizers

        from repro.doctor.artefacts.checkpoints.tokenizer import TOKENIZER

        fast = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))  # noqa: S106 - no password
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        (tmp_path / "model").mkdir()
        fast.save(str(tmp_path / "model" / "tokenizer.json"))
        (tmp_path / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        assert TOKENIZER.fits(tmp_path / "model")
        (tokenizer,) = TOKENIZER.read(tmp_path / "model")
        data = written(
            tmp_path / "train.jsonl", [{"prompt": "a " * 10, "label": ""}, {"prompt": "a " * 11, "label": ""}]
        )
        read = reading(tmp_path, f"{FLAGS} --rollout-max-prompt-len 10")
        (finding,) = told("data-too-long", data, read, tokenizer)
        assert "1 of 2" in finding.message and "longest of 11 tokens" in finding.message
        assert (finding.certainty, finding.where.line) == ("certain", 2)
        assert told("data-too-long", data, read, None) == []

    def test_all_dropped_is_a_warning(self, tmp_path: Path) -> None:
        """Nothing is left to train on."""
        data = written(tmp_path / "train.jsonl", LONG)
        (finding,) = told("data-too-long", data, reading(tmp_path, f"{FLAGS} --rollout-max-prompt-len 64"), None)
        assert finding.severity == "warning"

    def test_a_batch_of_more_than_twice_the_data(self, tmp_path: Path) -> None:
        """The data source goes round once, and the rollout is short: "data-too-few"."""
        data = written(tmp_path / "train.jsonl", GOOD)
        (finding,) = told("data-too-few", data, reading(tmp_path, f"{FLAGS} --rollout-batch-size 41"))
        assert "short of it" in finding.message

    def test_one_pass_serves_all_rules(self, tmp_path: Path) -> None:
        """The file is read once for the keys of one launch."""
        data = written(tmp_path / "train.jsonl", GOOD)
        survey.cache_clear()
        everything(data, reading(tmp_path))
        assert survey.cache_info().misses == 1


class TestRecognised:
    """What is prompt data and what is not."""

    @pytest.mark.parametrize(
        ("name", "row"),
        [
            ("a.jsonl", {"prompt": "a"}), ("a.jsonl", {"messages": [{"role": "user", "content": "a"}]}),
            ("a.jsonl", {"Frage": "a", "label": "b"}), ("a.jsonl", {"turns": [{"role": "user", "content": "a"}]}),
        ],
    )  # fmt: skip
    def test_prompts_are(self, name: str, row: object, tmp_path: Path) -> None:
        """By the names of common fields, or by messages."""
        (tmp_path / name).write_text(json.dumps(row))
        assert PROMPTS.fits(tmp_path / name)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("events.jsonl", '{"timestamp":"2026-11-20T15:47:21Z","type":"metric","text":"a"}'),
            ("steps.jsonl", '{"step": 0, "root": "00"}'),
            ("results.jsonl", '{"prompt": "a", "response": "b", "reward": 1.0}'),
            ("a.jsonl", "[1, 2]"), ("a.jsonl", ""), ("a.json", '{"prompt": "a"}'), ("a.txt", '{"prompt": "a"}'),
        ],
    )  # fmt: skip
    def test_events_results_and_the_like_are_not(self, name: str, text: str, tmp_path: Path) -> None:
        """They are other readers' or nobody's."""
        (tmp_path / name).write_text(text + "\n")
        assert not PROMPTS.fits(tmp_path / name)

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        """It is no file."""
        os.mkfifo(tmp_path / "train.jsonl")
        assert not PROMPTS.fits(tmp_path / "train.jsonl")

    def test_parquet_is_read_by_rows(self, tmp_path: Path) -> None:
        """With the same rules as lines."""
        rows = [*GOOD, {"prompt": "", "label": "1"}]
        data = read(parquet(tmp_path / "train.parquet", rows))
        assert [row for _, row in data.rows()] == rows
        (finding,) = told("data-empty-prompt", data, None)
        assert finding.where.line == 21
        parquet(tmp_path / "columns.parquet", [{"rollout_id": 1, "reward": 1.0}])
        assert not PROMPTS.fits(tmp_path / "columns.parquet")

    def test_a_torn_parquet_is_one_line(self, tmp_path: Path) -> None:
        """It says that it is not whole."""
        path = parquet(tmp_path / "train.parquet", GOOD)
        path.write_bytes(path.read_bytes()[:-40])
        assert PROMPTS.fits(path)
        with pytest.raises(ReproError, match="write it again") as error:
            list(PROMPTS.read(path))
        assert "\n" not in str(error.value)

    def test_a_parquet_that_breaks_inside_is_one_line(self, tmp_path: Path) -> None:
        """Its rows come to an end with a `ReproError`, whatever byte was changed."""
        path = parquet(tmp_path / "train.parquet", GOOD, compression="none")
        whole = path.read_bytes()
        for at in range(4, len(whole), 97):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
            assert outcome(path) in ("rows", "one line")


def outcome(path: Path) -> str:
    """What reading comes to."""
    try:
        for data in PROMPTS.read(path):
            assert isinstance(data, PromptData)
            list(data.rows())
    except ReproError as error:
        return "several lines" if "\n" in str(error) else "one line"
    return "rows"
