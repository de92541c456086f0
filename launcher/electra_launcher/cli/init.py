"""`electra-dist init`: writes a config of the user's own with its keys explained; it needs no repository."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from electra_dist.errors import UserError
from electra_dist.store.atomic_files import replacing, writable
from electra_launcher.cli.command_output import open_console

_CONFIG_FILE = "pretrain.yaml"  # config.yaml would make the folder a run folder


class Size(StrEnum):
    """Sizes that `init` offers, and the packaged config of each."""

    TINY = "tiny"
    SMALL = "small"
    BASE = "base"
    LARGE = "large"
    MODERN_BASE = "modern_base"

    @property
    def config(self) -> str:
        """The path of the packaged config, as `--config` takes it."""
        names = {Size.TINY: "demo_cpu", Size.BASE: "base_size", Size.LARGE: "large_25pct_mask"}
        return f"configs/{names.get(self, self.value)}.yaml"


def init(
    folder: Annotated[Path, typer.Argument(help="folder for the config, and later for its corpus and its run")],
    size: Annotated[
        Size, typer.Option(help="size of the model; tiny learns from 60 KB to 5 MB of text on two CPU cores")
    ] = Size.SMALL,
) -> None:
    """Write FOLDER/pretrain.yaml, a config of your own with each key explained, and print the commands that use it.

    The values are those of the config of this size that comes with the package. Edit them; `electra-dist config
    FOLDER/pretrain.yaml --describe` shows all other keys.
    """
    from electra_dist.config.load import find_config_file, load_config, read_yaml

    file = folder / _CONFIG_FILE
    if file.exists():
        raise UserError(f"{file}: there is a config already; edit it, or give another folder")
    tree = read_yaml(find_config_file(Path(size.config)))
    vocab_size = load_config(size.config).model.vocab_size
    tree["extends"] = size.config
    tree["run_dir"] = str(folder / "run")
    tree["data"] |= {"corpus": str(folder / "corpus"), "heldout": "{corpus}/heldout"}
    with writable(file):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file, only_new=True) as out_file:
            out_file.write(_commented(tree, size).encode())
    out = open_console(soft_wrap=True)
    out.print(f"{file} is written. Edit it, then, with TEXT as the folder of your text:")
    vocabulary, config = shlex.quote(str(folder / "vocab.txt")), shlex.quote(str(file))
    corpus, run = shlex.quote(str(folder / "corpus")), shlex.quote(str(folder / "run"))
    out.print(f"  electra-dist corpus vocab --input TEXT --output {vocabulary} --size {vocab_size}")
    out.print(f"  electra-dist corpus build --input TEXT --vocab {vocabulary} --output {corpus} --config {config}")
    out.print(f"  electra-dist train {config}")
    out.print(f"  electra-dist export {run}")
    out.print(
        "Text in a table or in JSON lines: add --text-field COLUMN to both corpus commands, unless it is `text`."
    )
    if size is Size.TINY:
        out.print("The training takes three minutes on two CPU cores, and longer on a machine that does other work.")


def _commented(tree: dict[str, Any], size: Size) -> str:
    """Return a config as YAML, with the first sentence of its description above each key."""
    from electra_dist.config import Config
    from electra_dist.config.keys import fields

    described = fields(Config)
    lines = [
        f"# A run of size {size.value}. Paths are relative to the folder in which a command is started.",
        "# Only `extends` is relative to this file, or names a config that comes with the package, as it does here.",
    ]

    def add(key: str, value: object, indent: str = "") -> None:
        field = described.get(key)
        if field is not None and field.description:
            lines.append(f"{indent}# {field.description.split('. ')[0].rstrip('.')}.")
        lines.append(f"{indent}{key.rpartition('.')[2]}: {_yaml(value)}")

    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"\n{key}:")
            for inner_key, inner_value in value.items():
                add(f"{key}.{inner_key}", inner_value, "  ")
        else:
            add(key, value)
    return "\n".join(lines) + "\n"


def _yaml(value: object) -> str:
    """Return a value as YAML on one line."""
    import yaml

    return yaml.safe_dump([value], default_flow_style=True, sort_keys=False, width=1_000)[1:-2]
