"""`python -m hf_ring_attention` is `hf-ring-attention`."""

from .cli.main import main

if __name__ == "__main__":
    main()
