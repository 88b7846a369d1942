"""Run by vLLM's own Python: what its model classes hold after loading, as its own saver writes it.

    python vllm_state.py RANKS PORT SOURCE TARGET [SOURCE TARGET …]

TARGET gets it in one file per rank, TARGET-parts in files of at most PART_SIZE bytes of tensors. The state is
taken before post-load processing, which packs weights for one kind of CPU. If any model has experts, the first
must: vLLM makes their process group only then.
"""

import os
import sys
from multiprocessing import get_context
from pathlib import Path

PART_SIZE = 50_000


def save(rank: int, ranks: int, port: str, pairs: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), VLLM_DIST_IDENT=port)
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    torch.set_num_threads(1)
    ready = False
    for source, target in zip(pairs[::2], pairs[1::2], strict=True):
        arguments = EngineArgs(
            model=source,
            dtype="float16",
            enforce_eager=True,
            max_model_len=128,
            skip_tokenizer_init=True,
            tensor_parallel_size=ranks,
            distributed_executor_backend="mp",
        )
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            if not ready:
                address = f"tcp://127.0.0.1:{port}"
                init_distributed_environment(ranks, rank, address, rank, "gloo")
                initialize_model_parallel(ranks)
                ready = True
            with set_default_torch_dtype(torch.float16):
                model = initialize_model(vllm_config=config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
            for path, most in ((target, None), (target + "-parts", PART_SIZE)):
                Path(path).mkdir(parents=True, exist_ok=True)
                ShardedStateLoader.save_model(model, path, max_size=most)
    print("saved", rank, flush=True)


if __name__ == "__main__":
    count, address_port, *sources_and_targets = int(sys.argv[1]), *sys.argv[2:]
    context = get_context("spawn")
    workers = [
        context.Process(target=save, args=(rank, count, address_port, sources_and_targets))
        for rank in range(count)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode or 0) for worker in workers))
