"""mount, unmount, staged, and the helper that mount(8) runs."""
