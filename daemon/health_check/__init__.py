"""Whether a job may start on this node, for nvidia-resiliency-ext's launcher and whoever asks as it does."""
