"""`python -m gateway`: one worker; started by `gateway.app.supervisor`."""

from gateway.app.worker import main

if __name__ == "__main__":
    main()
