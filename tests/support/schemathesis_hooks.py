"""What Schemathesis is to know of a Conductor: a model that has instances, and what a refusal has to say.

It is loaded by Schemathesis's own process (SCHEMATHESIS_HOOKS), once.
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import schemathesis
from schemathesis import Case, GenerationMode

from tests.support.conductors import NAMESPACE

_NAMED = re.compile(
    r"\$|`\w+`|unknown field|JSON|malformed|truncated|utf-8"  # the place in the body, or that it is no body
    r"|\b(tokens|hashes|length|waited_s|ttft_slo_s|tbt_slo_s|output_tokens|cached_tokens|exclude|requests)\b"
    r"|\b(instance|namespace|url|engine_\w+|store_\w+|weights|role)\b|token \d+ is"
)


@schemathesis.hook
def before_call(ctx: schemathesis.HookContext, case: Case[Any], kwargs: dict[str, Any]) -> None:
    """Have most valid bodies ask for a model that there is, with a namespace that its pool has."""
    generated = case.meta
    if generated is None or generated.generation.mode is not GenerationMode.POSITIVE:
        return
    if not isinstance(case.body, dict) or random.random() < 0.2:
        return
    if "model" in case.body:
        case.body["model"] = "m"
    if "namespace" in case.body:
        case.body["namespace"] = NAMESPACE.as_mapping()
    if case.operation.path in ("/v1/route", "/v1/match"):
        tokens = case.body.get("tokens") or [1, 2, 3]
        case.body.update(tokens=tokens, hashes=None, length=None)


@schemathesis.check
def a_refusal_names_what_is_wrong(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: Case[Any]
) -> None:
    if response.status_code == 400:
        message = json.loads(response.content)["error"]["message"]
        assert _NAMED.search(message), f"{message!r} names nothing"
