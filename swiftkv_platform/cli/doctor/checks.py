"""The list of checks, in the order in which they are reported."""

from __future__ import annotations

from swiftkv_platform.cli.doctor.clock import examine_clock
from swiftkv_platform.cli.doctor.compiler import examine_compiler
from swiftkv_platform.cli.doctor.control_plane import examine_control_plane
from swiftkv_platform.cli.doctor.database import examine_database
from swiftkv_platform.cli.doctor.disk import examine_disk
from swiftkv_platform.cli.doctor.findings import Check
from swiftkv_platform.cli.doctor.gpu import examine_gpu
from swiftkv_platform.cli.doctor.limits import examine_limits
from swiftkv_platform.cli.doctor.object_store import examine_object_store
from swiftkv_platform.cli.doctor.operator_files import examine_operator_files
from swiftkv_platform.cli.doctor.packages import examine_packages
from swiftkv_platform.cli.doctor.ports import examine_ports
from swiftkv_platform.cli.doctor.python_version import examine_python
from swiftkv_platform.cli.doctor.ray_cluster import examine_ray
from swiftkv_platform.cli.doctor.variables import examine_variables
from swiftkv_platform.cli.doctor.vllm_version import examine_vllm
from swiftkv_platform.cli.doctor.wandb_server import examine_wandb

CHECKS: tuple[Check, ...] = (
    Check("python", examine_python, "run it with another Python of 3.11 or newer"),
    Check("packages", examine_packages, "install again, in a new environment: pip install 'swiftkv-platform[all]'"),
    Check("settings", examine_variables, "look at the variables that begin with SWIFTKV_"),
    Check("operator files", examine_operator_files, "look at the files that SWIFTKV_*_FILE name"),
    Check("disk", examine_disk, "look for a file system that does not answer: df"),
    Check("ports", examine_ports, "look at what listens on this machine: ss -ltnp"),
    Check("limits", examine_limits, "look at ulimit -a and at free -m"),
    Check(
        "database", examine_database, "see whether SWIFTKV_DATABASE_URL names a server that can be reached from here"
    ),
    Check("object store", examine_object_store, "see whether AWS_ENDPOINT_URL names a server that answers from here"),
    Check("clock", examine_clock, "see whether database and object store answer"),
    Check("ray", examine_ray, "see whether SWIFTKV_RAY_DASHBOARD_URL can be reached from here"),
    Check("control plane", examine_control_plane, "see whether SWIFTKV_URL can be reached from here"),
    Check("compiler", examine_compiler, "try the compiler by hand: g++ --version"),
    Check("gpu", examine_gpu, "try the driver by hand: nvidia-smi"),
    Check("vllm", examine_vllm, "install vLLM again"),
    Check("wandb", examine_wandb, "see whether WANDB_BASE_URL can be reached from here, or set WANDB_MODE=offline"),
)
