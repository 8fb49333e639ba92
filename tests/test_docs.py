"""The examples in the documentation run, each by itself after the definitions of its page, on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import yafsdp_cc
from tests.cli.command import yafsdp_cc as command_line
from tests.ranks import on_ranks
from tests.soak import LONG
from tests.versions import COMPRESSED_STAGES
from yafsdp_cc.tools import cli

ROOT = Path(__file__).parent.parent


TUTORIALS = ["loop", "lora", "slow-network", "machines"]
GUIDES = [
    "using",
    "recipes",
    "checkpoints",
    "batches",
    "large-models",
    "quantised",
    "migrating",
    "migrating-others",
    "compression",
    "one-bit",
    "muon",
    "launch",
    "profiling",
    "pipelines",
    "replicas",
    "exchange",
]
PAGES = ["README.md", *(f"docs/{name}.md" for name in GUIDES), *(f"docs/tutorials/{name}.md" for name in TUTORIALS)]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=COMPRESSED_STAGES) if page == "docs/pipelines.md" else page for page in PAGES]
)
def test_examples_run(page: str, tmp_path: Path) -> None:
    if page.endswith("lora.md"):
        pytest.importorskip("peft", reason="peft is not installed (extra 'frameworks')")
    on_ranks(2, _run_examples, page, tmp_path)


def _run_examples(page: str, folder: Path) -> None:
    definitions, *examples = blocks_of((ROOT / page).read_text(encoding="utf-8"), "python")
    os.chdir(folder)
    for number, example in enumerate(examples or [""], start=1):
        script = compile(f"{definitions}\n{example}", f"<{page}, example {number}>", "exec")
        module = ModuleType(f"example{number}")
        sys.modules[module.__name__] = module  # torch's compiler looks a function's module up by its name
        exec(script, module.__dict__)


ELSEWHERE = (
    "make ",
    "source ",
    "srun ",
    "yafsdp-cc launch --nnodes=2",
    *(f"python -m bench --suite {name}" for name in ("slow", "train", "pipeline", "replicas")),
)
"""Begins of commands that need an installation of their own, Slurm, a second machine or hours."""
COMMANDS = ["README.md", *(f"docs/{name}.md" for name in ("launch", "estimate", "frameworks", "netlab"))]
COMMANDS += [f"docs/tutorials/{name}.md" for name in TUTORIALS]
"""Pages with commands; those of profiling.md have a test of their own, those of cuda.md need a GPU."""
TUTORIAL = "docs/tutorials/loop.md"


@LONG
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", COMMANDS)
def test_commands_run(page: str, tmp_path: Path) -> None:
    """Each in its turn, in a folder that has the repository's programs and the files that the page speaks of."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = "\n".join(blocks_of(text, "bash")).replace("\\\n", "").splitlines()
    commands = [line for line in lines if line and not line.startswith("#")]
    assert commands
    _make_files(text, tmp_path)
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in commands:
        if not command.startswith(ELSEWHERE):
            done = subprocess.run(
                ["bash", "-ec", command],
                cwd=tmp_path,
                env={**os.environ, "PATH": found, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def _make_files(page: str, folder: Path) -> None:
    """Make what the commands of a page name: its script, or that of the first tutorial; a factory; a config."""
    own, tutorial = (blocks_of(text, "python") for text in (page, (ROOT / TUTORIAL).read_text(encoding="utf-8")))
    is_own = "`train.py`" in page and own not in ([], tutorial)
    (folder / "train.py").write_text(own[0] if is_own else "\n".join(tutorial[:2]))
    for name in ("bench", "docs"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("package", "path/to/model"):
        (folder / name).mkdir(parents=True)
    (folder / "package" / "module.py").write_text(own[0] if own else "")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    config = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, **sizes}
    for path in (folder, folder / "path/to/model"):
        (path / "config.json").write_text(json.dumps(config))


def blocks_of(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_links_name_files_and_headings() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench/results").glob("*.md")]:
        for link, anchor in re.findall(r"\]\((?![a-z]+:)([^)\s#]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
            target = page.parent / link if link else page
            assert target.exists(), f"{page.relative_to(ROOT)} links to {link}"
            assert not anchor or anchor in anchors_of(target), f"{page.relative_to(ROOT)} links to {link}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page: its headings as GitHub and the site name them, and ids that are written out."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        *(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings),
        *re.findall(r'<a id="([^"]+)">', text),
    }


def test_pages_that_the_package_names_are_there() -> None:
    """With the heading that is named beside, as in ``docs/compression.md, "A codec of your own"``."""
    named = []
    for file in (ROOT / "yafsdp_cc").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        named += re.findall(r"""(docs/[\w-]+\.md)(?:, ['"]([^'"]+)['"])?""", source)
    assert len(named) > 5
    for page, heading in named:
        assert (ROOT / page).exists(), page
        assert not heading or re.search(rf"^#+ {re.escape(heading)}$", (ROOT / page).read_text(), re.MULTILINE), heading


@LONG
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra 'docs')")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    for name in set(yafsdp_cc.__all__) - set(yafsdp_cc._MODULES):
        assert f'.{name}"' in reference, f"yafsdp_cc.{name} is missing from docs/reference.md"


@LONG
def test_the_commands_on_profiling_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands, one after the other, on the script that it shows. What ``launch`` runs, ``profile`` runs, too."""
    text = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    script, commands = (blocks_of(text, kind)[0] for kind in ("python", "bash"))
    (tmp_path / "train.py").write_text(script)
    launch, *others = map(str.split, commands.splitlines())
    assert launch == ["yafsdp-cc", "launch", "--nproc-per-node=2", "train.py"]
    monkeypatch.chdir(tmp_path)
    for _, command, *arguments in others:
        if command == "profile":
            done = command_line(command, *arguments, folder=tmp_path)
            assert done.returncode == 0, done.stderr
        else:
            assert cli.main([command, *arguments]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"rank[01].json.gz, 2 steps of ", printed)) == 2
    assert all(len(re.findall(rf"^{unit} ", printed, re.MULTILINE)) == 2 for unit in range(3)), "all units of both"
    assert "runs/mine: " in printed
