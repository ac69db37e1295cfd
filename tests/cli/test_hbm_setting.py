"""`kvfs serve --hbm` on a machine without a GPU: it serves, and says what it lacks."""

from __future__ import annotations

import json

from tests.support.service import Service, run_kvfs

LACK = "no GPU memory for blocks: the CUDA driver: /none/libcuda.so: "


def test_a_service_without_a_driver_says_so() -> None:
    with Service(
        mode="off", arguments=["--hbm", "1GiB"], environment={"KVFS_LIBCUDA": "/none/libcuda.so"}
    ) as service:
        assert f"missing  {LACK}" in service.log()
        at = ("--at", str(service.data))
        hbm = json.loads(run_kvfs("status", "--json", *at).stdout)["hbm"]
        assert (hbm["devices"], hbm["capacity_bytes"]) == ([], 0)
        assert hbm["missing"][0].startswith(LACK)
        page = run_kvfs("status", *at).stdout
        assert LACK in page
        assert "GPU memory" in page
