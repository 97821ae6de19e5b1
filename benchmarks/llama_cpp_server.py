"""llama.cpp's own HTTP server, as the wheel of xllamacpp brings it, in this process until it is ended.

Run: ``python -m benchmarks.llama_cpp_server model.gguf --port 8080``.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path


def main() -> None:
    """Serve a GGUF file under the OpenAI API."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2, help="for prompts and for answers, each (default 2)")
    parser.add_argument("--slots", type=int, default=32, help="requests at once; more wait (default 32)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a slot (default 512)")
    arguments = parser.parse_args()

    import xllamacpp

    options = xllamacpp.CommonParams()
    options.model.path = str(arguments.gguf)
    options.port = arguments.port
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = arguments.threads
    options.n_parallel = arguments.slots
    options.n_ctx = arguments.slots * arguments.context
    options.verbosity = 0
    # It serves from threads of its own for as long as the object lives.
    server = xllamacpp.Server(options)
    print(server.listening_address, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
