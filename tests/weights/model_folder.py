"""A model's files, those beside them that are not fetched, and what a folder holds of them."""

from __future__ import annotations

from pathlib import Path

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model.safetensors": b"weights" * 10_000,
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer.model": b"pieces",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
}
UNWANTED = {
    "README.md": b"# model",
    "consolidated.safetensors": b"a copy",
    "model.Q4_0.gguf": b"GGUF",
    "modeling_llama.py": b"raise SystemExit",
    "onnx/model.onnx": b"onnx",
    "original/consolidated.00.pth": b"pickle",
    "original/tokenizer.json": b"{ }",
    "pytorch_model.bin": b"pickle",
    "training_args.pt": b"pickle",
}
TEXT = set(MODEL) - {"model.safetensors"}


def names(folder: Path | None) -> set[str]:
    assert folder is not None
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def contents(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {name: (folder / name).read_bytes() for name in names(folder)}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
