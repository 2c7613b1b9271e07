{{- define "kvferry.engineContainer" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
- name: vllm
  image: {{ include "kvferry.image" (dict "root" . "image" .Values.engine.image) }}
  imagePullPolicy: {{ .Values.engine.image.pullPolicy }}
  command: {{ toJson .Values.engine.command }}
  args:
    {{- include "kvferry.engineArgs" . | nindent 4 }}
  env:
    {{- include "kvferry.engineEnv" . | nindent 4 }}
  {{- if not (hasKey . "headless") }}
  ports:
    - name: http
      containerPort: {{ int64 .Values.engine.port }}
  startupProbe:
    httpGet:
      path: /health
      port: http
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: {{ div (int64 .Values.engine.startupSecondsMax) 10 }}
  readinessProbe:
    httpGet:
      path: /health
      port: http
    periodSeconds: 10
    timeoutSeconds: 5
  livenessProbe:
    httpGet:
      path: /health
      port: http
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: 6
  {{- end }}
  lifecycle:
    {{- if hasKey . "headless" }}
    # Until then the leader's requests need these ranks.
    preStop:
      sleep:
        seconds: {{ add (int64 .Values.engine.preStopSleepSeconds) (int64 .Values.engine.shutdownTimeoutSeconds) }}
    {{- else }}
    # Endpoints forget the pod meanwhile; then vLLM ends its running requests.
    preStop:
      sleep:
        seconds: {{ int64 .Values.engine.preStopSleepSeconds }}
    {{- end }}
  resources:
    {{- include "kvferry.engineResources" . | nindent 4 }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: {{ .Values.engine.readOnlyRootFilesystem }}
    capabilities:
      drop: [ALL]
  volumeMounts:
    - name: run
      mountPath: {{ include "kvferry.mountDir" . }}
    - name: engine-shm
      mountPath: /dev/shm
    - name: engine-tmp
      mountPath: /tmp
    - name: models
      mountPath: {{ .Values.engine.models.mountPath }}
    {{- if eq .Values.connector.source "copy" }}
    - name: connector
      mountPath: {{ include "kvferry.connectorDir" . }}
      readOnly: true
    {{- end }}
    {{- with .Values.engine.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "kvferry.engineArgs" -}}
- {{ required "model: name the model to serve, for example --set model=Qwen/Qwen3-0.6B" .Values.model | quote }}
- --port={{ int64 .Values.engine.port }}
- --tensor-parallel-size={{ int64 .Values.engine.tensorParallelSize }}
- --pipeline-parallel-size={{ int64 .Values.engine.pipelineParallelSize }}
- --shutdown-timeout={{ int64 .Values.engine.shutdownTimeoutSeconds }}
{{- if gt (int64 .Values.engine.nodes) 1 }}
# The variables are set by the controller of the LeaderWorkerSet.
- --nnodes={{ int64 .Values.engine.nodes }}
- --node-rank=$(LWS_WORKER_INDEX)
- --master-addr=$(LWS_LEADER_ADDRESS)
- --distributed-executor-backend=mp
{{- if hasKey . "headless" }}
- --headless
{{- end }}
{{- end }}
- --kv-transfer-config
- {{ include "kvferry.transferConfig" . | quote }}
{{- with .Values.engine.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvferry.engineEnv" -}}
{{- /* A uid without an entry in the image's passwd has no home and no name. */ -}}
- name: HOME
  value: /tmp
- name: USER
  value: kvferry
- name: HF_HOME
  value: {{ .Values.engine.models.mountPath }}
{{- if eq .Values.connector.source "copy" }}
- name: PYTHONPATH
  value: {{ include "kvferry.connectorDir" . }}
{{- end }}
{{- if eq .Values.gpu.access "none" }}
- name: VLLM_CPU_KVCACHE_SPACE
  value: {{ int64 .Values.engine.cpuKvCacheGiB | quote }}
{{- end }}
{{- with .Values.engine.hfToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.engine.hfToken.key }}
{{- end }}
{{- with .Values.engine.apiKey.existingSecret }}
- name: VLLM_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.engine.apiKey.key }}
{{- end }}
{{- with .Values.engine.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Copies one pure-Python folder: engine and sidecar then always speak one protocol. */ -}}
{{- define "kvferry.connectorContainer" -}}
- name: connector
  image: {{ include "kvferry.image" (dict "root" . "image" .Values.image) }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [cp, -r, /opt/kvferry/kvferry_connector, {{ include "kvferry.connectorDir" . }}/]
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 64Mi}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    capabilities:
      drop: [ALL]
  volumeMounts:
    - name: connector
      mountPath: {{ include "kvferry.connectorDir" . }}
{{- end }}

{{- define "kvferry.engineVolumes" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
- name: engine-shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ $sizes.engineShmMi }}Mi
- name: engine-tmp
  emptyDir: {}
- name: models
  {{- if .Values.engine.models.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.engine.models.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ .Values.engine.models.size }}
  {{- end }}
{{- if eq .Values.connector.source "copy" }}
- name: connector
  emptyDir:
    sizeLimit: 16Mi
{{- end }}
{{- with .Values.engine.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* An engine's pod. Takes the root; with "headless" it is a further one of an engine over several. */ -}}
{{- define "kvferry.enginePod" -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
{{- $sizes := include "kvferry.sizes" . | fromYaml -}}
{{- $names := dict "root" . "component" (ternary "engine-worker" "engine" (hasKey . "headless")) -}}
metadata:
  labels:
    {{- include "kvferry.labels" $names | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: vllm
    {{- if $sidecar }}
    checksum/config: {{ include "kvferry.toml" . | sha256sum }}
    {{- include "kvferry.gpuPodAnnotations" . | trim | nindent 4 }}
    {{- end }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "kvferry.podCommon" . | nindent 2 }}
  {{- include "kvferry.gpuRuntime" . | trim | nindent 2 }}
  {{- if $sidecar }}
  # Equal numbers of two processes would look like one process to the GPU driver.
  shareProcessNamespace: true
  terminationGracePeriodSeconds: {{ int64 $sizes.podGraceSeconds }}
  {{- include "kvferry.gpuClaims" . | trim | nindent 2 }}
  {{- else }}
  terminationGracePeriodSeconds: {{ int64 $sizes.engineGraceSeconds }}
  {{- end }}
  securityContext:
    {{- include "kvferry.podSecurity" . | nindent 4 }}
  {{- with .Values.engine.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.engine.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - {{- toYaml . | nindent 6 }}
      labelSelector:
        matchLabels:
          {{- include "kvferry.selector" $names | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- if or $sidecar (eq .Values.connector.source "copy") }}
  initContainers:
    {{- if eq .Values.connector.source "copy" }}
    {{- include "kvferry.connectorContainer" . | nindent 4 }}
    {{- end }}
    {{- if $sidecar }}
    {{- include "kvferry.sidecarContainer" . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    {{- include "kvferry.engineContainer" . | nindent 4 }}
    {{- if $sidecar }}
    {{- include "kvferry.uiContainer" . | trim | nindent 4 }}
    {{- end }}
  volumes:
    - name: run
      {{- if $sidecar }}
      emptyDir:
        sizeLimit: 16Mi
      {{- else }}
      hostPath:
        path: {{ .Values.daemonset.hostPath }}
        # Made by the DaemonSet; until then the pod waits.
        type: Directory
      {{- end }}
    {{- include "kvferry.engineVolumes" . | nindent 4 }}
    {{- if $sidecar }}
    {{- include "kvferry.sidecarVolumes" . | nindent 4 }}
    {{- end }}
{{- end }}
