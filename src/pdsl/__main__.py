from pdsl.cli.main import main

main()
