"""Self-signed certificates for tests. Concurrency: one thread."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certificate(where: Path, names: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate and its key; `names` as OpenSSL writes subjectAltName."""
    files = where / "cert.pem", where / "key.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    subprocess.run(
        [
            *("openssl", "req", "-x509", *curve, "-nodes", "-days", "2"),
            *("-subj", "/CN=kvfs-test", "-addext", f"subjectAltName={names}"),
            *("-out", str(files[0]), "-keyout", str(files[1])),
        ],
        check=True,
        capture_output=True,
    )
    return files
