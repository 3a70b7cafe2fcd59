"""What ZeRO's stages 2 and 3, which gather weights for every pass, cannot be combined with."""

from __future__ import annotations

from megatron.config.notices import spelled
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.pipeline_schedules import SCHEDULES


def check_gathered_weights(config: RunConfig) -> None:
    parallel = config.parallel
    if parallel.zero < 2:
        return
    (asked, *_) = (name for name, stage in parallel.zero_asked.items() if stage == parallel.zero)
    obstacles = {
        "pipeline_schedule": (
            SCHEDULES[parallel.schedule].defers_wgrads,
            "it computes weight gradients after those of the layer were reduced; use 1f1b",
        ),
        "cuda_graphs": (
            config.kernels.cuda_graphs,
            "a graph has fixed addresses, and gathered weights have none; leave one of the two out",
        ),
        "compile": (config.kernels.compile, "the two have not been tried together; leave one of them out"),
        "store_param_remainders": (
            config.optimizer.store_param_remainders,
            "the masters are the weights that the ranks keep; leave it out",
        ),
        "optimizer_offload_fraction": (
            config.optimizer.optimizer_offload_fraction < 1.0,
            "where weights are divided, all of the optimizer's state is offloaded or none; leave it at 1",
        ),
    }
    for name, (given, why) in obstacles.items():
        if given:
            raise ConfigError(f"{spelled(config, asked)}: does not work with {spelled(config, name)}: {why}")


def check_place_of_parameters(config: RunConfig) -> None:
    if config.parallel.zero == 3 and config.parallel.remote_device == "nvme":
        raise ConfigError(
            f"{spelled(config, 'remote_device')}: parameters are kept in host memory or on the device, not in files; "
            "use cpu, or leave it out"
        )
    if config.parallel.parameters_on_host and config.parallel.num_distributed_optimizer_instances > 1:
        raise ConfigError(
            f"{spelled(config, 'num_distributed_optimizer_instances')}: does not work with "
            f"{spelled(config, 'remote_device')}: gradients in host memory are not summed between instances; leave one "
            "of the two out"
        )


CHECKS = (check_gathered_weights, check_place_of_parameters)
