from pdsl.cli import main

main()
