from attn_ext_cli import main

main()
