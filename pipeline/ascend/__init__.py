"""What is known of the chip and of vllm-ascend: the serve command, its environment, options and rules."""
