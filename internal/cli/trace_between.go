package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/unixsock"
	"csi-registrar/internal/tool/trace"
)

// between prepares to forward calls from one address to another.
func between(ctx context.Context, listen, connect string) (trace.Listener, trace.Dial, error) {
	source, sourceErr := parseAddress("listen", listen)
	target, err := parseAddress("connect", connect)
	if err := cmp.Or(sourceErr, err); err != nil {
		return nil, nil, err
	}
	l, err := listenAt(ctx, source)
	dial := func(ctx context.Context) (trace.Conn, error) {
		d := net.Dialer{Timeout: traceDial}
		c, err := d.DialContext(ctx, target.Network(), target.String())
		if err != nil {
			return nil, err
		}
		return c.(trace.Conn), nil
	}
	return l, dial, err
}

// parseAddress parses the value of a flag: PATH, unix:PATH or tcp:ADDRESS:PORT. A TCP socket has no
// owner and no mode, so only loopback addresses are allowed.
func parseAddress(flag, s string) (net.Addr, error) {
	fail := func(err error) (net.Addr, error) { return nil, usagef("--%s %q: %w", flag, s, err) }
	if address, isTCP := strings.CutPrefix(s, "tcp:"); isTCP {
		ap, err := netip.ParseAddrPort(address)
		if err != nil || !ap.Addr().IsLoopback() {
			return fail(errors.New("TCP needs a loopback address and a port, such as tcp:127.0.0.1:PORT"))
		}
		return net.TCPAddrFromAddrPort(ap), nil
	}
	path := strings.TrimPrefix(strings.TrimPrefix(s, "unix://"), "unix:")
	if !strings.HasPrefix(path, "/") && !strings.HasPrefix(path, ".") {
		return fail(errors.New("must be a path that begins with / or ., or tcp:127.0.0.1:PORT"))
	}
	if err := unixsock.CheckPath(path); err != nil {
		return fail(err)
	}
	return &net.UnixAddr{Net: "unix", Name: path}, nil
}

// listenAt listens at an address. Close removes the file of a socket.
func listenAt(ctx context.Context, a net.Addr) (trace.Listener, error) {
	address := a.String()
	if a.Network() == "tcp" {
		var lc net.ListenConfig
		tcp, err := lc.Listen(ctx, "tcp", address)
		if err != nil {
			return nil, fmt.Errorf("cannot listen: %w", err)
		}
		return tcp.(*net.TCPListener), nil
	}
	unix, _, err := unixsock.Listen(ctx, address, nil)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, hinted(fmt.Errorf("cannot listen: %s already exists", safetext.Word(address)),
			"use another path; or, if no process listens there, "+safetext.Run("rm", address).String())
	}
	if err != nil {
		return nil, fmt.Errorf("cannot listen: %w", err)
	}
	unix.SetUnlinkOnClose(true)
	return unix, nil
}
