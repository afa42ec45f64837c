"""What is known of transformers models: where V and O live, how to fuse, and the proof."""
