# SPDX-License-Identifier: Apache-2.0
"""Exchange models with Hugging Face transformers.

    python -m csa_model.hf export --checkpoint RUN/checkpoints/last.ckpt --out DIR
    python -m csa_model.hf import DIR --out CKPT

`export` writes what DeepseekV4ForCausalLM.from_pretrained(DIR) and AutoTokenizer.from_pretrained(DIR) read; `import` makes a checkpoint of such a
directory, to start from with init_from=CKPT. Both need the extra `hf`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from csa_model import console
from csa_model.config import ConfigError
from csa_model.hf.config_map import ARCHITECTURE
from csa_model.hf.export import Exported, export
from csa_model.hf.importing import Imported, import_directory


def main(arguments: Sequence[str]) -> None:
    """The command line. Leaves with a non-zero status and one readable message for what a user can mend."""
    console.quiet()
    options = _parser().parse_args(arguments)
    with console.exit_on_error():
        if importlib.util.find_spec("safetensors") is None:
            raise ConfigError("csa_model.hf needs the package safetensors: pip install '.[hf]'")
        if options.command == "import":
            report_import(import_directory(options.directory, options.out, options.hash_seed), options.out)
            return
        done = export(
            options.checkpoint,
            options.out,
            form=options.form,
            tokenizer=options.tokenizer,
            with_tokenizer=not options.no_tokenizer,
            cache_dir=options.cache_dir,
        )
        report_export(done)
        if options.check:
            from csa_model.hf.check import compare_with_class

            print(compare_with_class(options.checkpoint, done.out))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m csa_model.hf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="checkpoint -> Hugging Face directory")
    out.add_argument("--checkpoint", required=True, help="a checkpoint file or a run folder")
    out.add_argument("--out", required=True, help="the folder to write, new or empty")
    out.add_argument("--form", choices=("hf", "own"), default="hf", help=f"hf: {ARCHITECTURE}; own: for models that it cannot express")
    out.add_argument("--tokenizer", help="a tokenizer.json; default: that of the run")
    out.add_argument("--no-tokenizer", action="store_true", help="write no tokenizer files")
    out.add_argument("--cache-dir", help="where the run's token cache lies; default: data.cache_dir of the run")
    out.add_argument("--check", action="store_true", help="load the result with transformers and compare logits (needs transformers)")
    into = commands.add_parser("import", help="Hugging Face directory -> checkpoint")
    into.add_argument("directory")
    into.add_argument("--out", required=True, help="the checkpoint file to write")
    into.add_argument("--hash-seed", type=int, help="draw hash tables that are all zero from this seed")
    return parser


def report_export(done: Exported) -> None:
    rows = [
        ("form", ARCHITECTURE if done.form == "hf" else "own (csa_lightning)"),
        ("tensors", f"{len(done.tensors)}, {done.parameters:,} parameters"),
    ]
    if done.mtp_tensors:
        note = f"; {ARCHITECTURE} builds no MTP block and ignores them" if done.form == "hf" else ""
        rows.append(("MTP tensors", f"{len(done.mtp_tensors)}, as {done.mtp_tensors[0].rsplit('.', 2)[0].split('.attn')[0]}.*{note}"))
    if not any(name.startswith("tokenizer") for name in done.files):
        rows.append(("tokenizer", "none written"))
    console.print_table("export", [*rows, ("files", ", ".join(done.files)), ("folder", str(done.out))])


def report_import(found: Imported, out: str) -> None:
    model = found.model
    parameters = sum(v.numel() for name, v in found.weights.items() if v.is_floating_point() and not name.endswith("gate.bias"))
    rows = [
        (
            "model",
            f"{model.name}, {model.num_hidden_layers} layers, {parameters:,} parameters, MTP block {'present' if model.mtp.enabled else 'absent'}",
        ),
        ("tokenizer", ", ".join(found.tokenizer_files) or "none"),
        *(("note", note) for note in found.notes),
        ("checkpoint", out),
        ("model section", f"{out.rsplit('.', 1)[0]}.model.yaml (copy it to configs/model/ and train with init_from={out})"),
    ]
    console.print_table("import", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
