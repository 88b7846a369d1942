"""A checkpoint split into one set of files per tensor-parallel rank, as vLLM's `sharded_state` loads it.

    config.py       config.json, read with distrust; what every plan is computed from
    quantization.py which linear is quantized how, from quant_model_description.json
    plan.py         the vocabulary: a target tensor, the pieces it is made of, how a piece is cut
    layers.py       what the architectures share: linears, experts, norms, embeddings
    qwen3.py …      one module per architecture: its tensors in the order in which vLLM registers them
    plans.py        the plan of a model: architecture, options, and what cannot be split
    source.py       the checkpoint's tensors, and where each one's bytes are
    binding.py      plan and checkpoint brought together: anything missing, extra or misshapen is refused
    convert.py      from the checkpoint's dtypes to those of vLLM's parameters
    writer.py       all ranks written in one pass
    record.py       the JSON beside the shards
    check.py        any directory of shards held against its plan

The rules are those of vLLM 0.20.2 and vllm-ascend 0.20.2rc1 (its classes for 310P), and hold bit for bit.
"""
