from attn_ext.cli import main

main()
