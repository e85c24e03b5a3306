// Command kubernetes is etcd, kube-apiserver, kube-scheduler, kubelet and kubeadm in one static
// binary, which is linked once and kept (see package controlplane). It runs on any Linux:
//
//	kubernetes etcd DIR CLIENT-URL PEER-URL
//	kubernetes kube-apiserver FLAG...
//	kubernetes kube-scheduler FLAG...
//	kubernetes kubelet FLAG...
//	kubernetes kubeadm COMMAND...
//	kubernetes fake-runtime SOCKET
//
// The last one serves a container runtime that runs nothing. If the program is called by the name
// kubelet or kubeadm, it is that.
package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"go.etcd.io/etcd/server/v3/embed"
	"k8s.io/component-base/cli"
	"k8s.io/cri-client/pkg/fake"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeadm "k8s.io/kubernetes/cmd/kubeadm/app"
	kubeadmerrors "k8s.io/kubernetes/cmd/kubeadm/app/util/errors"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	args := os.Args[1:]
	if name := filepath.Base(os.Args[0]); name == "kubelet" || name == "kubeadm" {
		args = append([]string{name}, args...)
	}
	os.Exit(run(args))
}

func run(args []string) int {
	if len(args) == 0 {
		fmt.Fprintln(os.Stderr, "error: a role is missing")
		return 2
	}
	role, args := args[0], args[1:]
	switch role { // these handle signals themselves
	case "kube-apiserver":
		cmd := apiserver.NewAPIServerCommand()
		cmd.SetArgs(args)
		return cli.Run(cmd)
	case "kube-scheduler":
		cmd := scheduler.NewSchedulerCommand()
		cmd.SetArgs(args)
		return cli.Run(cmd)
	case "kubelet":
		cmd := kubelet.NewKubeletCommand(context.Background())
		cmd.SetArgs(args)
		return cli.Run(cmd)
	case "kubeadm":
		os.Args = append([]string{role}, args...) // where it takes them from
		kubeadmerrors.HandleError(kubeadm.Run())
		return 0
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var err error
	switch {
	case role == "etcd" && len(args) == 3:
		err = etcd(ctx, args[0], args[1], args[2])
	case role == "fake-runtime" && len(args) == 1:
		err = fakeRuntime(ctx, args[0])
	default:
		err = fmt.Errorf("unknown role %q, or wrong arguments %q", role, args)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		return 1
	}
	return 0
}

func etcd(ctx context.Context, dir, client, peer string) error {
	c, err := url.Parse(client)
	if err != nil {
		return err
	}
	p, err := url.Parse(peer)
	if err != nil {
		return err
	}
	cfg := embed.NewConfig()
	cfg.Dir, cfg.LogLevel, cfg.UnsafeNoFsync = dir, "error", true
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{*c}, []url.URL{*c}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{*p}, []url.URL{*p}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	e, err := embed.StartEtcd(cfg)
	if err != nil {
		return err
	}
	defer e.Close()
	select {
	case err := <-e.Err():
		return err
	case <-ctx.Done():
		return nil
	}
}

func fakeRuntime(ctx context.Context, socket string) error {
	runtime := fake.NewFakeRemoteRuntime()
	runtime.ImageService.SetFakeImageSize(1) // the kubelet treats 0 as an error
	if err := runtime.Start("unix://" + socket); err != nil {
		return err
	}
	<-ctx.Done()
	runtime.Stop()
	return nil
}
