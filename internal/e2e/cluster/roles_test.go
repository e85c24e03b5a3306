package cluster

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"go.etcd.io/etcd/server/v3/embed"
	"golang.org/x/sys/unix"
	"k8s.io/component-base/cli"
	"k8s.io/cri-client/pkg/fake"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	"csi-registrar/internal/e2e/harness"
)

// role makes the test binary one of the cluster's programs: one binary to link.
const role = "CSI_E2E_CLUSTER_ROLE"

func TestMain(m *testing.M) {
	switch args := os.Args[1:]; os.Getenv(role) {
	case "etcd":
		os.Exit(etcdMain(args))
	case "kube-apiserver":
		cmd := apiserver.NewAPIServerCommand()
		cmd.SetArgs(args)
		os.Exit(cli.Run(cmd))
	case "kubelet":
		os.Exit(kubeletMain(args))
	}
	harness.Main(m)
}

// etcdMain runs etcd until TERM: data directory, client and peer URL.
func etcdMain(args []string) int {
	if err := runEtcd(args[0], args[1], args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "etcd:", err)
		return 1
	}
	return 0
}

func runEtcd(dir, client, peer string) error {
	c, p, err := parse(client, peer)
	if err != nil {
		return err
	}
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.UnsafeNoFsync = dir, "error", true
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{c}, []url.URL{c}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{p}, []url.URL{p}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	select {
	case err := <-e.Err():
		return err
	case <-ctx.Done():
		return nil
	}
}

func parse(client, peer string) (c, p url.URL, err error) {
	cu, err := url.Parse(client)
	if err != nil {
		return c, p, err
	}
	pu, err := url.Parse(peer)
	if err != nil {
		return c, p, err
	}
	return *cu, *pu, nil
}

// kubeletMain runs the kubelet over a container runtime that does nothing: the runtime's
// socket and a scratch directory come first, then the kubelet's flags. It is in a mount
// namespace of its own.
func kubeletMain(args []string) int {
	if err := isolate(args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "cannot keep the kubelet's hands off the machine:", err)
		return 1
	}
	runtime := fake.NewFakeRemoteRuntime()
	runtime.ImageService.SetFakeImageSize(1) // the kubelet takes 0 for an error
	if err := runtime.Start("unix://" + args[0]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer runtime.Stop()
	cmd := kubelet.NewKubeletCommand(context.Background())
	cmd.SetArgs(args[2:])
	return cli.Run(cmd)
}

// tunables are what a kubelet writes to the kernel.
var tunables = []string{
	"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
	"kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
}

// isolate gives this process's mount namespace copies of the kernel's tunables to write
// to, and a /var/log of its own.
func isolate(scratch string) error {
	for _, name := range tunables {
		real := filepath.Join("/proc/sys", name)
		value, err := os.ReadFile(real)
		if err != nil {
			return err
		}
		copied := filepath.Join(scratch, filepath.Base(name))
		if err := os.WriteFile(copied, value, 0o600); err != nil {
			return err
		}
		if err := unix.Mount(copied, real, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("cannot bind over %s: %w", real, err)
		}
	}
	if err := unix.Mount("tmpfs", "/var/log", "tmpfs", 0, ""); err != nil {
		return fmt.Errorf("cannot mount over /var/log: %w", err)
	}
	return nil
}
