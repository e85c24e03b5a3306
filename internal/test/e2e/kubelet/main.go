// Package kubelet runs the part of a kubelet that registers CSI drivers: the plugin manager, the
// CSI handler and the node info manager of Kubernetes, with a fake API server that validates
// CSINode objects like the real one. It implements cmd/kubelet, which documents usage and output,
// and the same command for an older Kubernetes.
//
// The CSI handler keeps its drivers in package variables, so a process can run only one kubelet.
package kubelet

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager/cache"
	"k8s.io/kubernetes/pkg/volume/csi"
	volumetest "k8s.io/kubernetes/pkg/volume/testing"
)

type options struct {
	root     string
	node     string
	handler  string
	state    string
	untilEOF bool
	verbose  int
}

// Main runs the command until a signal arrives (or, with --until-eof, standard input ends) and
// returns its exit code.
func Main(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	var o options
	flags := flag.NewFlagSet("kubelet", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.root, "root", "", "the kubelet's root `DIR`; plugins_registry is below it")
	flags.StringVar(&o.node, "node", "node", "`NAME` of the Node and CSINode objects")
	flags.StringVar(&o.handler, "handler", "csi", "csi: the kubelet's CSI handler; record: say yes to everything")
	flags.StringVar(&o.state, "state", "", "`FILE` that keeps the API server's objects, so that they outlive this kubelet")
	flags.BoolVar(&o.untilEOF, "until-eof", false, "end when standard input ends")
	flags.IntVar(&o.verbose, "v", 0, "klog's level, on standard error")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	if o.root == "" || flags.NArg() != 0 || o.handler != "csi" && o.handler != "record" {
		fmt.Fprintln(stderr, "error: --root is needed, --handler is csi or record, and nothing else is taken")
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, stdin, stdout); err != nil {
		fmt.Fprintln(stderr, "error:", err)
		return 1
	}
	return 0
}

func run(ctx context.Context, o options, stdin io.Reader, stdout io.Writer) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := logLevel(o.verbose); err != nil {
		return err
	}
	if err := errors.Join(makeDirectories(o.root), listenPodResources(ctx, o.root), watchDevicePlugins(o.root)); err != nil {
		return err
	}
	events := &events{w: stdout, broken: cancel}
	events.print(event{Event: "started", Node: o.node, Root: o.root})
	var (
		handler cache.PluginHandler = yes{}
		api     *apiServer
	)
	if o.handler == "csi" {
		var err error
		if api, err = newAPIServer(o.node, o.state, events); err != nil {
			return err
		}
		if err := startCSI(o, api); err != nil {
			return err
		}
		handler = csi.PluginHandler
	}
	manager := pluginmanager.NewPluginManager(filepath.Join(o.root, "plugins_registry"), record.NewFakeRecorder(0))
	manager.AddHandler(registerapi.CSIPlugin, &recorder{handler, events})
	var wg sync.WaitGroup
	wg.Go(func() {
		manager.Run(ctx, config.NewSourcesReady(func(sets.Set[string]) bool { return true }), ctx.Done())
	})
	// Reading cannot be interrupted; this goroutine ends with the process.
	go func() {
		commands(stdin, api, events)
		if o.untilEOF {
			cancel(errEOF)
		}
	}()
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, errEOF) && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// listenPodResources listens on the pod resources socket as each kubelet does; doctor finds the
// root directory by it. If the path of the root directory is too long for a socket, there is none.
func listenPodResources(ctx context.Context, root string) error {
	path := filepath.Join(root, "pod-resources", "kubelet.sock")
	if len(path) > 107 {
		return nil
	}
	err := os.MkdirAll(filepath.Dir(path), 0o750)
	if err == nil {
		err = os.RemoveAll(path)
	}
	if err != nil {
		return err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { l.Close() })
	return nil
}

// makeDirectories makes the root directory and plugins_registry with the modes of a kubelet, which
// does so before it starts its plugin manager (v1.37: setupDataDirs).
func makeDirectories(root string) error {
	return os.MkdirAll(filepath.Join(root, "plugins_registry"), 0o750)
}

// watchDevicePlugins watches a directory as the kubelet's device manager does, until the process
// ends, because the plugin manager's watch is not the only one of a kubelet.
func watchDevicePlugins(root string) error {
	dir := filepath.Join(root, "device-plugins")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err == nil {
		_, err = unix.InotifyAddWatch(fd, dir, unix.IN_CREATE)
	}
	return err
}

var errEOF = errors.New("standard input ended")

// startCSI starts the kubelet's CSI volume plugin as its volume manager does. The testing host is
// the smallest implementation of what the plugin needs; it uses its testing.T only to report that
// the set-up failed.
func startCSI(o options, api *apiServer) (err error) {
	failed := true
	done := make(chan struct{})
	go func() { // Fatal ends the goroutine that calls it
		defer close(done)
		volumetest.NewFakeKubeletVolumeHostWithCSINodeName(&testing.T{}, o.root, api.client, csi.ProbeVolumePlugins(), o.node, nil, nil)
		failed = false
	}()
	<-done
	if failed {
		return errors.New("cannot start the kubelet's CSI plugin; run with --v 4 to see why")
	}
	return nil
}

func logLevel(v int) error {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	if err := flags.Set("v", fmt.Sprint(v)); err != nil {
		return fmt.Errorf("cannot set klog's level: %w", err)
	}
	return nil
}
