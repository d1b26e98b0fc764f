"""JSON schemas of what the launch files contain, stricter than the engines: all fields are named, and none is null.

Sources: the reference of SkyPilot's task YAML (0.14), JobSet v1alpha2, and Kubernetes' Service, PersistentVolumeClaim,
Job (batch/v1) and PodSpec. A field that a file begins to use is looked up there, and then added.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
TRUTH: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
QUANTITY: Schema = {"type": ["integer", "string"], "pattern": r"^\d+(m|[KMGT]i?)?$"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
PATH: Schema = {"type": "string", "pattern": "^/"}


def one_of(*values: str) -> Schema:
    """Return the schema of a closed set."""
    return {"enum": list(values)}


def items(of: Schema) -> Schema:
    """Return the schema of a list that is not empty."""
    return {"type": "array", "items": of, "minItems": 1}


def table(of: Schema) -> Schema:
    """Return the schema of a mapping with any keys."""
    return {"type": "object", "additionalProperties": of}


def fields(required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object with no other fields; `required` are names between spaces."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def resource(version: str, kind: str, spec: Schema) -> Schema:
    """Return the schema of a Kubernetes resource."""
    return fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=fields("name", name=NAME),
        spec=spec,
    )


SKYPILOT = fields(
    "resources run",
    resources=fields(
        accelerators={"type": "string", "pattern": r"^[\w-]+:\d+$"},
        cpus={"type": "string", "pattern": r"^\d+\+?$"},
        memory={"type": "string", "pattern": r"^\d+\+?$"},
        ports={"type": "integer"},
        use_spot=TRUTH,
        job_recovery=fields(strategy=one_of("EAGER_NEXT_REGION", "FAILOVER"), max_restarts_on_errors=COUNT),
    ),
    workdir=TEXT,
    envs={
        "type": "object",
        "propertyNames": {"pattern": "^[A-Z_]+$"},
        "additionalProperties": {"type": ["string", "integer", "null"]},  # null: to be given with --env
    },
    secrets=table({"type": "null"}),  # to be given with --secret
    file_mounts=table(fields("name mode", name=TEXT, mode=one_of("MOUNT", "COPY", "MOUNT_CACHED"))),
    setup=TEXT,
    run=TEXT,
)

_ENV = fields("name", name=TEXT, value=TEXT, valueFrom=fields(secretKeyRef=fields("name key", name=NAME, key=TEXT))) | {
    "oneOf": [{"required": ["value"]}, {"required": ["valueFrom"]}]
}
_CONTAINER = fields(
    "name image command",
    name=NAME,
    image=TEXT,
    command=items(TEXT),
    args=items(TEXT),
    workingDir=PATH,
    env=items(_ENV),
    resources=fields(limits=table(QUANTITY), requests=table(QUANTITY)),
    volumeMounts=items(fields("name mountPath", name=NAME, mountPath=PATH)),
)
_VOLUME = fields(
    "name",
    name=NAME,
    emptyDir=fields(),
    configMap=fields("name", name=NAME, optional=TRUTH),
    persistentVolumeClaim=fields("claimName", claimName=NAME),
)
_POD = fields(
    "spec",
    metadata=fields(labels=table(NAME)),
    spec=fields(
        "containers restartPolicy",
        restartPolicy={"const": "Never"},  # a podFailurePolicy requires it
        terminationGracePeriodSeconds=COUNT,
        containers=items(_CONTAINER),
        volumes=items(_VOLUME),
    ),
)
_JOB = fields(
    "template",
    backoffLimit=COUNT,
    podReplacementPolicy={"const": "Failed"},  # the only one that is allowed beside a podFailurePolicy
    podFailurePolicy=fields(
        "rules",
        rules=items(
            fields(
                "action",
                action=one_of("FailJob", "Ignore", "Count"),
                onExitCodes=fields(
                    "operator values",
                    containerName=NAME,
                    operator=one_of("In", "NotIn"),
                    values=items({"type": "integer", "minimum": 1, "maximum": 255}),
                ),
                onPodConditions=items(
                    fields("type status", type=one_of("DisruptionTarget"), status=one_of("True", "False", "Unknown"))
                ),
            )
        ),
    ),
    template=_POD,
)
_JOB_SET = fields(
    "replicatedJobs",
    failurePolicy=fields(
        maxRestarts=COUNT,
        rules=items(
            fields(
                "name action",
                name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                action=one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                onJobFailureReasons=items(
                    one_of("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "PodFailurePolicy")
                ),
            )
        ),
    ),
    replicatedJobs=items(fields("name template", name=NAME, template=fields("spec", spec=_JOB))),
)
_SERVICE = fields(clusterIP={"const": "None"}, selector=table(NAME), ports=items(fields("port", port=COUNT)))
_CLAIM = fields(
    "accessModes resources",
    accessModes=items(one_of("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany")),
    resources=fields("requests", requests=table(QUANTITY)),
)

KUBERNETES = {
    "Service": resource("v1", "Service", _SERVICE),
    "PersistentVolumeClaim": resource("v1", "PersistentVolumeClaim", _CLAIM),
    "Job": resource("batch/v1", "Job", _JOB),
    "JobSet": resource("jobset.x-k8s.io/v1alpha2", "JobSet", _JOB_SET),
}
"""By kind."""
