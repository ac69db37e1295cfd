"""What S3 answers to who reads a configuration of a bucket that nobody ever set. Concurrency: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.xml import document, element

MISSING: Final[Mapping[str, str]] = {
    "cors": "NoSuchCORSConfiguration",
    "encryption": "ServerSideEncryptionConfigurationNotFoundError",
    "lifecycle": "NoSuchLifecycleConfiguration",
    "object-lock": "ObjectLockConfigurationNotFoundError",
    "policy": "NoSuchBucketPolicy",
    "publicAccessBlock": "NoSuchPublicAccessBlockConfiguration",
    "replication": "ReplicationConfigurationNotFoundError",
    "website": "NoSuchWebsiteConfiguration",
}
"""Query parameter to the error that says there is none."""

EMPTY: Final[Mapping[str, bytes]] = {
    "accelerate": document("AccelerateConfiguration", ()),
    "logging": document("BucketLoggingStatus", ()),
    "notification": document("NotificationConfiguration", ()),
    "ownershipControls": document(
        "OwnershipControls", ("<Rule>", element("ObjectOwnership", "BucketOwnerEnforced"), "</Rule>")
    ),
    "requestPayment": document("RequestPaymentConfiguration", (element("Payer", "BucketOwner"),)),
    "versioning": document("VersioningConfiguration", ()),
}
"""Query parameter to the document."""

NAMES: Final = (*MISSING, *EMPTY)
