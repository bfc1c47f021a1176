"""Settings of a launch: one checked value for everything that a flag, a file or a variable may say."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """What a launch does. Frozen; None means that the machine or the cluster decides."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_processes: int | None = Field(None, ge=1, description="processes over all machines")
    num_machines: int | None = Field(None, ge=1, description="machines")
    machine_rank: int | None = Field(None, ge=0, description="which machine this is, from 0")
    main_process_ip: str | None = Field(None, description="address of machine 0")
    main_process_port: int | None = Field(
        None, ge=0, le=65535, description="port on machine 0; 0 or none: a free one"
    )
    cpu: bool = Field(False, description="train on the CPU, whatever accelerators there are")
    gpu_ids: tuple[int, ...] | None = Field(None, description="accelerators to use, by index")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = Field(
        None, description="what with_amp() without an argument does"
    )
    num_microbatches: int | None = Field(
        None, ge=1, description="what accumulate() without an argument does"
    )
    max_restarts: int = Field(0, ge=0, description="times to start the world again after a failure")
    rdzv_backend: Literal["static", "c10d", "etcd-v2"] | None = Field(
        None, description="how machines find each other, as torchrun names it"
    )
    timeout_s: float | None = Field(
        None, gt=0, description="seconds that a collective may take before all ranks report and end"
    )
    log_dir: Path | None = Field(None, description="folder for each rank's output")
    tee: bool = Field(False, description="show what goes to log_dir on the screen too")
    threads_per_process: int | None = Field(
        None, ge=1, description="CPU threads of each process; none: the cores, divided"
    )
