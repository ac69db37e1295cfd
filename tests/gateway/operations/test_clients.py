"""Programs that people use, unmodified, against the S3 endpoint, in plain HTTP and over TLS.

aws, rclone and s5cmd come with the tests' packages, s3cmd from the system; one that is not there is skipped.
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import certificate
from tests.support.forked import imported
from tests.support.gateway import ACCESS, REGION, SECRET, Gateway, gateway

MIB = 1 << 20
SIZES = {
    "empty": 0,
    "small file +%.txt": 1234,
    "dir/one": 300_000,
    "dir/deep/two": 6 * MIB,
    "large": 21 * MIB,
}
MOST_S = 100.0
AWS = ("awscli.clidriver", "awscli.handlers")
"""What its program imports, and what that does first."""
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", params=["http", "https"])
def door(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    files = None if request.param == "http" else certificate(tmp_path_factory.mktemp("tls"))
    with gateway(dram="512MiB", certificate=files) as found:
        yield found
        assert not found.service.complaints()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    for name, size in SIZES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(size))
    return root


def run(door: Gateway, *command: str, environment: dict[str, str] | None = None) -> str:
    """Run a program to its end. Skips where it is not installed."""
    program = shutil.which(command[0], path=TOOLS)
    if program is None:
        pytest.skip(f"{command[0]} is not installed")
    own = {
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_REGION": REGION,
        "AWS_MAX_ATTEMPTS": "1",
        "HOME": str(door.service.base),
        "PATH": TOOLS,
    }
    if door.certificate is not None:
        own |= {"AWS_CA_BUNDLE": str(door.certificate), "SSL_CERT_FILE": str(door.certificate)}
    done = _run([program, *command[1:]], {**os.environ, **own, **(environment or {})}, door.service.base)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}\n{door.service.log()}"
    return done.stdout


def _run(command: list[str], environment: dict[str, str], work: Path) -> subprocess.CompletedProcess[str]:
    if Path(command[0]) == Path(sys.executable).with_name("aws"):
        return _fork_aws(command, environment, work)
    return subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=MOST_S,
        stdin=subprocess.DEVNULL,
        cwd=work,
    )


def _fork_aws(
    command: list[str], environment: dict[str, str], work: Path
) -> subprocess.CompletedProcess[str]:
    """Run the program of this Python as it is, after its imports, which take most of what a call of it takes."""
    data = str(Path(sysconfig.get_path("purelib"), "awscli", "data"))
    ready = imported(sys.executable, AWS, {})
    with tempfile.TemporaryFile() as output:
        process = ready.fork(
            command,
            path=[],
            environment={**environment, "AWS_DATA_PATH": data},  # which the first import sets
            work=work,
            output=output,
        )
        try:
            code = process.wait(MOST_S)
        finally:
            process.kill()
        output.seek(0)
        return subprocess.CompletedProcess(command, code, output.read().decode(), "")


def same(left: Path, right: Path) -> bool:
    """Whether two trees hold the same files."""
    return all(filecmp.cmp(left / name, right / name, shallow=False) for name in SIZES)


def test_aws_cli(door: Gateway, tree: Path, tmp_path: Path) -> None:
    aws = ("aws", "--endpoint-url", door.url)
    run(door, *aws, "s3", "mb", "s3://aws-bucket")
    run(door, *aws, "s3", "cp", "--recursive", str(tree), "s3://aws-bucket/tree")
    listed = run(door, *aws, "s3", "ls", "--recursive", "s3://aws-bucket/tree")
    assert all(f"tree/{name}" in listed for name in SIZES)
    run(door, *aws, "s3", "sync", "s3://aws-bucket/tree", str(tmp_path))
    assert same(tree, tmp_path)
    assert run(door, *aws, "s3", "sync", str(tree), "s3://aws-bucket/tree", "--size-only") == ""
    run(door, *aws, "s3", "mv", "s3://aws-bucket/tree/large", "s3://aws-bucket/moved")
    run(
        door,
        *aws,
        "s3api",
        "head-object",
        "--bucket",
        "aws-bucket",
        "--key",
        "moved",
        "--checksum-mode",
        "ENABLED",
    )
    run(door, *aws, "s3", "rb", "--force", "s3://aws-bucket")


def test_rclone(door: Gateway, tree: Path, tmp_path: Path) -> None:
    config = {
        "RCLONE_CONFIG_R_TYPE": "s3",
        "RCLONE_CONFIG_R_PROVIDER": "Other",
        "RCLONE_CONFIG_R_ENV_AUTH": "true",
        "RCLONE_CONFIG_R_ENDPOINT": door.url,
        "RCLONE_CONFIG": str(tmp_path / "rclone.conf"),
        "RCLONE_S3_CHUNK_SIZE": "5M",
        "RCLONE_S3_UPLOAD_CUTOFF": "10M",
    }
    if door.certificate is not None:
        config["RCLONE_CA_CERT"] = str(door.certificate)
    run(door, "rclone", "copy", str(tree), "R:rclone-bucket/tree", environment=config)
    run(door, "rclone", "check", "--download", str(tree), "R:rclone-bucket/tree", environment=config)
    run(door, "rclone", "sync", "R:rclone-bucket/tree", str(tmp_path / "back"), environment=config)
    assert same(tree, tmp_path / "back")
    run(door, "rclone", "copyto", "R:rclone-bucket/tree/large", "R:rclone-bucket/copy", environment=config)
    assert (
        len(
            run(door, "rclone", "lsf", "-R", "--files-only", "R:rclone-bucket", environment=config).split(
                "\n"
            )
        )
        == 7
    )
    run(door, "rclone", "purge", "R:rclone-bucket", environment=config)


def test_s5cmd(door: Gateway, tree: Path, tmp_path: Path) -> None:
    s5cmd = ("s5cmd", "--endpoint-url", door.url, "--no-verify-ssl", "--retry-count", "0")
    run(door, *s5cmd, "mb", "s3://s5-bucket")
    run(door, *s5cmd, "cp", "--part-size", "5", f"{tree}/", "s3://s5-bucket/tree/")
    assert "large" in run(door, *s5cmd, "ls", "s3://s5-bucket/tree/")
    run(door, *s5cmd, "cp", "--part-size", "5", "s3://s5-bucket/tree/*", f"{tmp_path}/")
    assert same(tree, tmp_path)
    run(door, *s5cmd, "rm", "s3://s5-bucket/*")
    run(door, *s5cmd, "rb", "s3://s5-bucket")


def test_s3cmd(door: Gateway, tree: Path, tmp_path: Path) -> None:
    where = f"{door.host}:{door.port}"
    s3cmd = [
        "s3cmd",
        f"--host={where}",
        f"--host-bucket={where}",
        f"--access_key={ACCESS}",
        f"--secret_key={SECRET}",
        f"--config={tmp_path / 'none'}",
        f"--region={REGION}",
        "--multipart-chunk-size-mb=5",
    ]
    s3cmd += ["--ssl", f"--ca-certs={door.certificate}"] if door.secure else ["--no-ssl"]
    run(door, *s3cmd, "mb", "s3://s3cmd-bucket")
    run(door, *s3cmd, "sync", f"{tree}/", "s3://s3cmd-bucket/tree/")
    assert "tree/large" in run(door, *s3cmd, "ls", "-r", "s3://s3cmd-bucket")
    run(door, *s3cmd, "sync", "s3://s3cmd-bucket/tree/", f"{tmp_path}/back/")
    assert same(tree, tmp_path / "back")
    run(door, *s3cmd, "info", "s3://s3cmd-bucket/tree/large")
    run(door, *s3cmd, "rb", "--recursive", "--force", "s3://s3cmd-bucket")


def test_boto3_transfers(door: Gateway, tree: Path, tmp_path: Path) -> None:
    s3 = door.client()
    s3.create_bucket(Bucket="boto-bucket")
    for name in SIZES:
        s3.upload_file(str(tree / name), "boto-bucket", name)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        s3.download_file("boto-bucket", name, str(tmp_path / name))
    assert same(tree, tmp_path)


def test_awscrt(door: Gateway, tree: Path, tmp_path: Path) -> None:
    """The client of AWS's common runtime, as engines' connectors use it: parallel parts, no HEAD before a GET."""
    door.client().create_bucket(Bucket="crt-bucket")
    data = (tree / "large").read_bytes()
    script = CRT.format(host=door.host, port=door.port, access=ACCESS, secret=SECRET, region=REGION)
    environment = {
        "KVFS_FILE": str(tree / "large"),
        "KVFS_BACK": str(tmp_path / "back"),
        "KVFS_CA": str(door.certificate or ""),
    }
    run(door, sys.executable, "-c", script, environment=environment)
    assert (tmp_path / "back").read_bytes() == data
    found: Any = door.client().get_object(Bucket="crt-bucket", Key="large")
    assert hashlib.sha256(found["Body"].read()).digest() == hashlib.sha256(data).digest()


CRT = """
import os
from awscrt import auth, http, io, s3
group = io.EventLoopGroup(1)
bootstrap = io.ClientBootstrap(group, io.DefaultHostResolver(group))
provider = auth.AwsCredentialsProvider.new_static("{access}", "{secret}")
tls = None
if os.environ["KVFS_CA"]:
    options = io.TlsContextOptions()
    options.override_default_trust_store_from_path(None, os.environ["KVFS_CA"])
    tls = io.ClientTlsContext(options).new_connection_options()
client = s3.S3Client(
    bootstrap=bootstrap, region="{region}", part_size=5 << 20, multipart_upload_threshold=8 << 20,
    signing_config=s3.create_default_s3_signing_config(region="{region}", credential_provider=provider),
    tls_mode=s3.S3RequestTlsMode.ENABLED if tls else s3.S3RequestTlsMode.DISABLED, tls_connection_options=tls)
endpoint = "{host}:{port}"

def request(method, **options):
    headers = http.HttpHeaders([("Host", endpoint)])
    if method == "PUT":
        headers.add("Content-Length", str(os.path.getsize(os.environ["KVFS_FILE"])))
    kind = s3.S3RequestType.PUT_OBJECT if method == "PUT" else s3.S3RequestType.GET_OBJECT
    made = client.make_request(
        type=kind, request=http.HttpRequest(method, "/crt-bucket/large", headers), **options)
    made.finished_future.result(60)

checksum = s3.S3ChecksumConfig(
    algorithm=s3.S3ChecksumAlgorithm.CRC32C, location=s3.S3ChecksumLocation.TRAILER)
request("PUT", send_filepath=os.environ["KVFS_FILE"], checksum_config=checksum)
request("GET", recv_filepath=os.environ["KVFS_BACK"])
"""
