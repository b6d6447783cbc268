"""One engine process: started, its front ends handed in, signalled, drained; or embedded in a caller's process."""
