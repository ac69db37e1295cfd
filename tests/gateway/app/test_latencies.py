"""The histogram of S3 operations counts each request that Python answers, under its operation."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from botocore.exceptions import ClientError
from prometheus_client.parser import text_string_to_metric_families

from tests.support.gateway import Gateway, gateway, listening_ports

BUCKET = "timed"


def samples(door: Gateway, name: str) -> dict[str, float]:
    """The values of one metric, by operation."""
    [port] = listening_ports(door) - {door.port}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        sample.labels["operation"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_each_request_is_counted_under_its_operation() -> None:
    with gateway(settings='admin = "127.0.0.1:0"') as door:
        s3 = door.client()
        s3.create_bucket(Bucket=BUCKET)
        for n in range(3):
            s3.put_object(Bucket=BUCKET, Key=f"k{n}", Body=b"x")
        s3.list_objects_v2(Bucket=BUCKET)
        for _ in range(4):
            s3.get_object(Bucket=BUCKET, Key="k0")["Body"].read()
        with pytest.raises(ClientError):
            s3.get_object_tagging(Bucket=BUCKET, Key="none")
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{door.port}/{BUCKET}/k0")  # unsigned
        counts = samples(door, "kvfs_s3_operation_seconds_count")
        requests = samples(door, "kvfs_s3_requests_total")
        assert counts.pop("GetObject") <= requests.pop("GetObject") == 4
        assert counts == requests
        assert counts == {"CreateBucket": 1, "PutObject": 3, "ListObjectsV2": 1, "GetObjectTagging": 1}
        sums = samples(door, "kvfs_s3_operation_seconds_sum")
        assert all(0 < duration_s < 60 for duration_s in sums.values())
