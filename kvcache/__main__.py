from kvcache.cli import main

main(prog_name="python -m kvcache")
