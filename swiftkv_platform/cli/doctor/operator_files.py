"""Check of the files that an operator keeps: API keys, issuers of tokens, tenants, secrets."""

from __future__ import annotations

from pathlib import Path

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, one_line
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.orchestration.tenants import Tenants
from swiftkv_platform.security.issuers import Issuer, parse_issuers
from swiftkv_platform.security.keys import KeyRing
from swiftkv_platform.security.operator_files import OperatorFile


def _issuers(path: Path) -> tuple[Issuer, ...]:
    hint = "it holds a list `issuers` (docs/operations.md)"
    return OperatorFile(path, parse_issuers, field="oidc_file", hint=hint).content.issuers


def examine_operator_files(surroundings: Surroundings) -> Finding:
    """Read each file as the control plane would."""
    settings = surroundings.settings
    read = []
    try:
        files = dict.fromkeys(path for path in (settings.api_keys_file, settings.serve_api_keys_file) if path)
        read += [f"{len(KeyRing(path).read())} keys in {path}" for path in files]
        trusted = dict.fromkeys(path for path in (settings.oidc_file, settings.serve_oidc_file) if path)
        read += [f"{len(_issuers(path))} issuers in {path}" for path in trusted]
        if settings.tenants_file is not None:
            Tenants(settings.tenants_file)
            read.append(f"quotas in {settings.tenants_file}")
    except InvalidInputError as error:
        return Finding("failed", one_line(error), f"mend the file that SWIFTKV_{str(error.field).upper()} names")
    if settings.secrets_dir is not None and not settings.secrets_dir.is_dir():
        message = f"SWIFTKV_SECRETS_DIR names {settings.secrets_dir}, which is no directory."
        return Finding("failed", message, "make it, with one file {tenant}/{name} a secret; or unset the variable")
    return Finding("ok", f"{', '.join(read)}." if read else "None is configured.")
