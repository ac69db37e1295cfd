"""`python -m gateway`: one worker; started by `gateway.supervisor`."""

from gateway.worker import main

if __name__ == "__main__":
    main()
